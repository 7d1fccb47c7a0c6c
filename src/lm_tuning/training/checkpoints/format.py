"""Checkpoints that are whole or not there: written aside, synced, then renamed.

Layout: ``<checkpoints>/<run>/checkpoint-<step>/``. Every run has a folder of its own, so starting again never
deletes what another run has kept.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from lm_tuning.errors import UserError
from lm_tuning.storage.atomic import sync_file, sync_folder
from lm_tuning.storage.write_failures import close_files_of, explain_full_disk, folder_bytes

MARKER = "lm_tuning_checkpoint.json"
STEP_LOG = "step_log.json"


@dataclass(frozen=True)
class RunIdentity:
    """What must be equal for a checkpoint to be continued.

    Attributes:
        tokens_key: key of the token set.
        base_digest: digest of the base model's weights.
        plan_digest: which rows form each step; see :meth:`StepPlan.digest`.
        effective_batch: readable size of an optimizer step, such as ``8 rows``.
        method: ``full`` or ``lora``, with the adapter's shape.
        weights: of the training sources, readable. Checkpoints from before there were any lack it.
    """

    tokens_key: str
    base_digest: str
    plan_digest: str
    effective_batch: str
    method: str
    weights: str = "1"

    _explanations: ClassVar[dict[str, str]] = {
        "tokens_key": "another token set (other rows, seed, tokenizer, data, split or tokenize parameters)",
        "base_digest": "another base model",
        "effective_batch": "another effective batch",
        "method": "another method or adapter",
        "weights": "other weights of data.path",
        "plan_digest": "another order of rows (seed or data)",
    }

    def describe_batch(self) -> str:
        """Return the size of a step for a sentence; what is stored keeps its spelling, so that old checkpoints fit."""
        return "1 row" if self.effective_batch == "1 rows" else self.effective_batch

    def differences(self, stored: dict[str, Any]) -> list[str]:
        """Name every part in which a stored identity differs, with both values."""
        found: list[str] = []
        for name, meaning in self._explanations.items():
            old, new = stored.get(name, getattr(type(self), name, None)), getattr(self, name)
            if old != new and not (name == "plan_digest" and found):  # the others change the order of rows too
                found.append(f"{meaning}: the checkpoint has {old!r}, this run {new!r}")
        return found


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk.

    Attributes:
        path: its folder.
        step: optimizer steps done.
        facts: what its marker holds.
    """

    path: Path
    step: int
    facts: dict[str, Any]


def new_run_folder(checkpoints: Path) -> Path:
    """Create the folder of a new run; names sort by start time.

    Raises:
        UserError: the disk is full, or takes no files for another reason.
    """
    folder = checkpoints / f"run-{datetime.now(UTC):%Y%m%dT%H%M%S%f}"
    with explain_full_disk(folder):
        folder.mkdir(parents=True)
    return folder


def find_latest(checkpoints: Path) -> Checkpoint | None:
    """Return the last complete checkpoint of the newest run that has one, else ``None``."""
    for run in sorted(checkpoints.glob("run-*"), reverse=True):
        complete = list_complete(run)
        if complete:
            return complete[-1]
    return None


def require_latest(checkpoints: Path) -> Checkpoint:
    """Return the last complete checkpoint of the newest run that has one.

    Raises:
        UserError: there is none.
    """
    checkpoint = find_latest(checkpoints)
    if checkpoint is None:
        raise UserError(
            f"train.resume is true, but {checkpoints} holds no complete checkpoint. "
            "Start with train.resume=false and set train.save_every_steps."
        )
    return checkpoint


def list_complete(run_folder: Path) -> list[Checkpoint]:
    """Return the complete checkpoints of a run, by step. A folder without its marker is half written."""
    found = []
    for path in run_folder.glob("checkpoint-*"):
        marker = path / MARKER
        if marker.is_file():
            facts = json.loads(marker.read_text())
            if facts.get("complete"):
                found.append(Checkpoint(path, int(facts["step"]), facts))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def check_resumable(checkpoint: Checkpoint, identity: RunIdentity) -> None:
    """Refuse to go on from a checkpoint of other data, model or steps.

    Raises:
        UserError: naming every difference with both values.
    """
    differences = identity.differences(checkpoint.facts["identity"])
    if differences:
        raise UserError(
            [
                f"train.resume: {checkpoint.path} does not belong to this run.",
                *(f"  - {difference}" for difference in differences),
                "Set these back to go on from it, or train.resume=false to start a new run (nothing is deleted). Which "
                "parameters have changed since stands in the run's parameters in MLflow.",
            ]
        )


@contextmanager
def writing_checkpoint(run_folder: Path, step: int, *, estimated_bytes: Callable[[], int]) -> Iterator[Path]:
    """Yield an empty folder beside the checkpoints to write the next one in, and clear what a kill has left.

    When the block fails, the folder goes: on a full disk the rest of the run (its log, its report) needs the space.

    Args:
        run_folder: the run's folder.
        step: optimizer steps done.
        estimated_bytes: returns about how much will be written; asked for where no earlier checkpoint shows it.

    Yields:
        The folder to fill, for :func:`publish_checkpoint`.

    Raises:
        UserError: the disk is full, or takes no files for another reason.
    """
    target, folder = run_folder / f"checkpoint-{step}", run_folder / f".writing-{step}"

    def wanted_bytes() -> int:
        complete = list_complete(run_folder)
        return folder_bytes(complete[-1].path) if complete else estimated_bytes()

    with explain_full_disk(
        target,
        what=f"the checkpoint of step {step}",
        wanted_bytes=wanted_bytes,
        go_on=lambda: describe_way_on(run_folder),
    ):
        half_deleted = (folder for folder in run_folder.glob("checkpoint-*") if not (folder / MARKER).is_file())
        for leftover in [*run_folder.glob(".writing-*"), *half_deleted]:
            shutil.rmtree(leftover)
        folder.mkdir(parents=True)
        try:
            yield folder
        except BaseException as error:
            close_files_of(error)
            shutil.rmtree(folder, ignore_errors=True)
            raise


def describe_way_on(run_folder: Path) -> str:
    """Describe which checkpoint of a run is kept and how to go on from it, or that there is none, in whole sentences.

    Args:
        run_folder: the run's folder.
    """
    complete = list_complete(run_folder)
    if complete:
        return (
            f"The checkpoint of step {complete[-1].step} is kept in {complete[-1].path}; go on with the same command "
            "and train.resume=true among its --params."
        )
    return "This run has no complete checkpoint to go on from; start it again."


def publish_checkpoint(
    staging: Path, run_folder: Path, *, step: int, identity: RunIdentity, run_id: str | None, facts: dict[str, Any]
) -> Checkpoint:
    """Turn a written folder into a complete checkpoint.

    Args:
        staging: what :func:`writing_checkpoint` gave, now filled.
        run_folder: the run's folder.
        step: optimizer steps done.
        identity: what a resume will compare.
        run_id: the tracking run to go on with; ``None`` without tracking.
        facts: anything else worth knowing, JSON values.
    """
    content = {
        **facts,
        "complete": True,
        "step": step,
        "mlflow_run_id": run_id,
        "identity": asdict(identity),
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    (staging / MARKER).write_text(json.dumps(content, indent=2))
    sync_folder(staging)
    target = run_folder / f"checkpoint-{step}"
    if target.exists():  # the same step again, after a resume: equal by construction
        _delete(target)
    staging.rename(target)
    sync_file(run_folder)
    return Checkpoint(target, step, content)


def prune(run_folder: Path, *, keep: int, protect: Path | None = None) -> list[Path]:
    """Delete the oldest complete checkpoints of one run beyond a number, and return them.

    Args:
        run_folder: the run's own folder; other runs are never touched.
        keep: how many of the newest stay.
        protect: a checkpoint that stays whatever its age (the best one).
    """
    removed = []
    for checkpoint in list_complete(run_folder)[: -keep or None]:
        if checkpoint.path != protect:
            _delete(checkpoint.path)
            removed.append(checkpoint.path)
    return removed


def _delete(folder: Path) -> None:
    """Delete a checkpoint, its marker first: a folder that is half deleted is not complete any more."""
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder)
