"""What a journal keeps, as it lies on disk: its header, the facts, and what sending them has come to.

A version that is updated in the middle goes on with journals of the one before, so keys are added and never renamed.
"""

from __future__ import annotations

from typing import Literal, NotRequired, Required, TypeAlias, TypedDict

from lm_tuning.json_types import JsonObject

#: ``of`` in the metrics of a training step; otherwise it is an entry of the catalog.
STEP = "step"

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]


class BeginFact(TypedDict):
    """A process has begun to write: a new run, or a resume."""

    kind: Literal["begin"]


class SettingsFact(TypedDict):
    """Every parameter, by flat name, and all of them as YAML."""

    kind: Literal["settings"]
    values: dict[str, str]
    text: str


class TagsFact(TypedDict):
    """Tags of the run."""

    kind: Literal["tags"]
    values: dict[str, str]


class MetricsFact(TypedDict):
    """Metrics of one step.

    Attributes:
        step: optimizer step; 0 for what belongs to the run as a whole.
        time: milliseconds since 1970, as MLflow counts.
        values: by name.
        of: whose names these are: :data:`STEP` or an entry of the catalog; without it MLflow's own.
        split: that was measured.
    """

    kind: Literal["metrics"]
    step: int
    time: int
    values: dict[str, float]
    of: NotRequired[str]
    split: NotRequired[str | None]


class FileFact(TypedDict):
    """A copy of a file.

    Attributes:
        path: in the journal's folder.
        folder: of the run that it belongs to.
        what: its name in messages.
    """

    kind: Literal["file"]
    path: str
    folder: str
    what: str


class RefusedFact(TypedDict):
    """A resume was refused, and the run is to be as it was before."""

    kind: Literal["refused"]
    reason: str


class EndFact(TypedDict):
    """How the run ended, and when, in milliseconds since 1970."""

    kind: Literal["end"]
    status: RunStatus
    time: int


Fact: TypeAlias = BeginFact | SettingsFact | TagsFact | MetricsFact | FileFact | RefusedFact | EndFact


class Experiment(TypedDict):
    """An experiment, should it have to be made."""

    name: str
    artifact_location: str | None
    tags: dict[str, str] | None


class RunHeader(TypedDict):
    """What is known of a run from the beginning; a stream that only adds to somebody's run knows the first three.

    Attributes:
        uri: the tracking store, without its password.
        run_id: of the run to go on with; None for a new one.
        is_ours: whether we end the run.
        experiment: that a new run goes to.
        run_name: of a new run.
        start_time: milliseconds since 1970.
        tags: that MLflow notes of every run.
    """

    uri: str
    run_id: str | None
    is_ours: bool
    experiment: NotRequired[Experiment]
    run_name: NotRequired[str]
    start_time: NotRequired[int]
    tags: NotRequired[dict[str, str]]


class JournalHeader(RunHeader):
    """The same with the version of the journal and the id that stands in for a run which the store has not made yet."""

    version: int
    stand_in: str


class JournalState(TypedDict, total=False):
    """What sending has come to.

    Attributes:
        sent: bytes of the facts that are sent.
        aside: facts that the store did not take while others went on.
        run_id: of the run, once the store has made it.
        is_creating: the store was asked to make the run; the answer may have been lost.
        is_stood_in_for: whether the stand-in was handed out, to checkpoints for one.
        begun_at: byte of the begin that was counted last, so that none is counted twice.
        num_resumes: how often the run was resumed.
        earlier_status: of the run before this resume.
        is_taken_back: whether this resume was refused.
    """

    sent: Required[int]
    aside: list[Fact]
    run_id: str
    is_creating: bool
    is_stood_in_for: bool
    begun_at: int
    num_resumes: int
    earlier_status: str
    is_taken_back: bool


class RunParams(TypedDict, total=False):
    """What Kedro tells its hooks of how a run was started, as far as it is read here."""

    env: str | None
    pipeline_names: list[str] | None
    tags: list[str] | None
    node_names: list[str] | None
    from_nodes: list[str] | None
    to_nodes: list[str] | None
    from_inputs: list[str] | None
    to_outputs: list[str] | None
    runtime_params: JsonObject | None
