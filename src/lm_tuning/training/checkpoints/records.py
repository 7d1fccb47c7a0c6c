"""What the marker of a checkpoint holds; a resume reads it, and checks it against these records first.

Keys that earlier versions did not write are not required.
"""

from __future__ import annotations

from typing import NotRequired, TypedDict

from lm_tuning.training.health.records import Fact, StoredHealth


class IdentityRecord(TypedDict):
    """See :class:`lm_tuning.training.checkpoints.format.RunIdentity`."""

    tokens_key: str
    base_digest: str
    plan_digest: str
    effective_batch: str
    method: str
    weights: NotRequired[str]


class BestRecord(TypedDict):
    """See :class:`lm_tuning.training.checkpoints.saving.BestCheckpoint`; there is none before the first evaluation."""

    metric: str
    value: float
    step: int


class FactsRead(TypedDict, total=False):
    """The facts that are calculated with after a resume; the others only stay in the report."""

    first_look_seconds: float
    steps_not_finite: list[Fact]


class Progress(TypedDict, total=False):
    """How far a run has come, apart from its step, and what it has a state for.

    Attributes:
        total_steps: of the run as it was laid out then.
        best: the best evaluation so far; ``None`` for none.
        health: findings and facts so far.
        training_seconds: of all processes of the run, evaluations and checkpoints included.
        total_seconds: the same with loading and the checks before step 1.
        health_seconds: of them, what the checks took.
        owes_evaluation: whether a request to stop broke the evaluation of this step off.
        freeze: ``train.freeze``. It is no part of the identity, since of a checkpoint without it nobody knows.
    """

    total_steps: int
    best: BestRecord | None
    health: StoredHealth
    training_seconds: float
    total_seconds: float
    health_seconds: float
    owes_evaluation: bool
    freeze: list[str] | None


class MarkerRecord(Progress):
    """The marker.

    Attributes:
        complete: whether all files are there; written last.
        step: optimizer steps done.
        identity: what a run must be like to go on.
        format_version: of what lies in the folder.
        mlflow_run_id: tracking run to go on with; ``None`` without tracking.
        written_at: as ISO 8601 in UTC.
        files: size in bytes of each file that a resume reads, by its path in the folder.
    """

    complete: bool
    step: int
    identity: IdentityRecord
    format_version: NotRequired[int]
    mlflow_run_id: NotRequired[str | None]
    written_at: NotRequired[str]
    files: NotRequired[dict[str, int]]
