"""Checkpoints that are whole or not there: written aside, synced, then renamed.

Layout: ``<checkpoints>/<run>/checkpoint-<step>/``. Every run has a folder of its own, so starting again never
deletes what another run has kept.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, cast

from lm_tuning.errors import UserError
from lm_tuning.json_types import JsonObject
from lm_tuning.parameters.base import write_value
from lm_tuning.parameters.train import QloraParameters
from lm_tuning.storage.atomic import sync_file, sync_folder
from lm_tuning.storage.write_failures import close_files_of, explain_full_disk, folder_bytes
from lm_tuning.training.checkpoints.records import IdentityRecord, MarkerRecord, Progress

MARKER = "lm_tuning_checkpoint.json"
STEP_LOG = "step_log.json"
# Of what lies in a checkpoint. The first versions did not write it down.
FORMAT_VERSION = 1

_NAME = re.compile(r"checkpoint-([1-9]\d*)")
# What libraries write beside a checkpoint and no resume needs.
_NOT_READ = {MARKER, "README.md", "training_args.bin", "config.json", "generation_config.json"}

# By exact type, since in Python a boolean is an integer.
_JSON_KINDS = {
    list: "a list",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    type(None): "null",
}


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

    def differences(self, stored: IdentityRecord) -> list[str]:
        """Name every part in which a stored identity differs, with the parameters behind it and both values."""
        found: list[str] = []
        for name, meaning in self._explanations.items():
            old, new = stored.get(name, getattr(type(self), name, None)), getattr(self, name)
            # In the order of the table, so that the digest of the plan is looked at last.
            if old != new and not (name == "plan_digest" and found):  # the others change the order of rows too
                changes = ", ".join(_name_changes(_parameters_in(str(old)), _parameters_in(new)))
                found.append(f"{meaning}: {changes or f'the checkpoint has {old!r}, this run {new!r}'}")
        return found


def _parameters_in(part: str) -> dict[str, str]:
    """Return the parameters that an effective batch or a method was written from, by key; none of anything else."""
    size = re.fullmatch(r"(?:at most )?(\d+) (rows|tokens)", part)
    if size:
        return {f"train.effective_batch_{size[2]}": size[1]}
    shape = re.fullmatch(r"(full|lora|qlora)(?: (\w+=.+))?", part)
    if shape is None:
        return {}
    values = {"train.method": shape[1]}
    # Lists hold commas too, but no name and equals sign behind them.
    for detail in re.split(r", (?=\w+=)", shape[2]) if shape[2] else ():
        key, _, value = detail.partition("=")
        group = "qlora" if key in QloraParameters.model_fields else "lora"
        values[f"train.{group}.{key}"] = {"True": "true", "False": "false"}.get(value, value)
    return values


def _name_changes(old: dict[str, str], new: dict[str, str]) -> Iterator[str]:
    """Name the parameters that differ, as ``key: old -> new``; nothing where one side has none to compare."""
    if not old or not new:
        return
    # Another method reads other groups, so what only one of them reads has not changed.
    is_same = old.get("train.method") == new.get("train.method")
    for key in old | new:
        before, now = old.get(key, "null"), new.get(key, "null")
        if before != now and (is_same or (key in old and key in new)):
            yield f"{key}: {before} -> {now}"


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
    facts: MarkerRecord


class UnreadableFileError(ValueError):
    """A file of a checkpoint is not what was written; the message begins with its name."""


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
    # Names sort by start time; the clock of the files would change with a copy.
    for run in sorted(checkpoints.glob("run-*"), reverse=True):
        complete = list_complete(run)
        if complete:
            return complete[-1]
    return None


def list_complete(run_folder: Path) -> list[Checkpoint]:
    """Return the complete checkpoints of a run, by step. A folder without its marker is half written.

    One whose marker cannot be read is left out here, and so is never deleted either;
    :func:`lm_tuning.training.checkpoints.integrity.require_latest` tells of it.
    """
    found = []
    for step, folder in list_marked(run_folder):
        try:
            facts = read_marker(folder)
        except UnreadableFileError:
            continue
        if facts["complete"]:
            found.append(Checkpoint(folder, step, facts))
    return found


def list_marked(run_folder: Path) -> list[tuple[int, Path]]:
    """Return step and folder of each checkpoint of a run that has a marker, whatever stands in it, by step.

    A folder with another name, such as a copy that a user has made, is none of ours.
    """
    return [(step, folder) for step, folder in _list_named(run_folder) if _has_marker(folder)]


def list_unmarked(run_folder: Path) -> list[tuple[int, Path]]:
    """Return step and folder of each checkpoint of a run that is half written or half deleted, by step."""
    return [(step, folder) for step, folder in _list_named(run_folder) if not _has_marker(folder)]


def read_marker(folder: Path) -> MarkerRecord:
    """Return what the marker of a checkpoint says.

    Args:
        folder: of a checkpoint, named by its step.

    Returns:
        The facts, with ``complete`` and ``step`` at least; whether the rest can be used is another question.

    Raises:
        UnreadableFileError: it is no JSON object, or has not these two, or they contradict the name of the folder.
    """
    facts = read_json_object(folder / MARKER)
    if not isinstance(facts.get("complete"), bool):
        raise UnreadableFileError(f"{MARKER}: complete is missing or no boolean.")
    # Compared with the folder: a copy under another step's name would bring the schedule and the weights apart.
    step, name = facts.get("step"), _NAME.fullmatch(folder.name)
    if not isinstance(step, int) or isinstance(step, bool) or name is None or step != int(name[1]):
        shown = f"{step!r:.60}" if "step" in facts else "missing"
        raise UnreadableFileError(f"{MARKER}: step is {shown}, and the folder's name is {folder.name}.")
    # What else it holds is checked where it is used: a marker that cannot be used is still one, and never deleted.
    return cast("MarkerRecord", facts)


def read_json_object(path: Path) -> JsonObject:
    """Read a file of a checkpoint that must be one JSON object.

    Raises:
        UnreadableFileError: it cannot be read, or holds something else.
    """
    try:
        values = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise UnreadableFileError(f"{path.name} cannot be read ({error.strerror or error}).") from error
    except UnicodeDecodeError as error:
        raise UnreadableFileError(f"{path.name} is damaged: it is no text in UTF-8.") from error
    except (ValueError, RecursionError) as error:
        raise UnreadableFileError(f"{path.name} is damaged: it is no JSON ({error}).") from error
    if not isinstance(values, dict):
        kind = _JSON_KINDS[type(values)]
        raise UnreadableFileError(f"{path.name} is damaged: it holds no JSON object but {kind}.")
    return values


def _list_named(run_folder: Path) -> list[tuple[int, Path]]:
    named = ((_NAME.fullmatch(path.name), path) for path in run_folder.glob("checkpoint-*"))
    return sorted((int(name[1]), path) for name, path in named if name is not None and path.is_dir())


def _has_marker(folder: Path) -> bool:
    # A link that leads nowhere is a damaged marker, and not a checkpoint that is half written.
    return os.path.lexists(folder / MARKER)


def check_resumable(checkpoint: Checkpoint, identity: RunIdentity, freeze: list[str] | None) -> None:
    """Refuse to go on from a checkpoint of other data, model, steps or trained parts.

    Args:
        checkpoint: to go on from.
        identity: of this run.
        freeze: ``train.freeze`` of this run.

    Raises:
        UserError: naming every difference with both values.
    """
    differences = identity.differences(checkpoint.facts["identity"])
    before = checkpoint.facts.get("freeze", freeze)
    # The optimizer's state goes by position: with as many other weights it would be taken for theirs.
    if sorted(before or []) != sorted(freeze or []):
        differences.append(f"other frozen parts: train.freeze: {write_value(before)} -> {write_value(freeze)}")
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
        # Killed between deleting its marker and the rest, a folder would hold disk space for good.
        half_deleted = [folder for _, folder in list_unmarked(run_folder)]
        for leftover in [*run_folder.glob(".writing-*"), *half_deleted]:
            shutil.rmtree(leftover)
        folder.mkdir(parents=True)
        try:
            yield folder
        except BaseException as error:
            # The traceback holds open files, whose space a full disk gets back only once they are closed.
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
    staging: Path, run_folder: Path, *, step: int, identity: RunIdentity, run_id: str | None, progress: Progress
) -> Checkpoint:
    """Turn a written folder into a complete checkpoint.

    Args:
        staging: what :func:`writing_checkpoint` gave, now filled.
        run_folder: the run's folder.
        step: optimizer steps done.
        identity: what a resume will compare.
        run_id: the tracking run to go on with; ``None`` without tracking.
        progress: how far the run has come.
    """
    content: MarkerRecord = {
        **progress,
        "format_version": FORMAT_VERSION,
        "complete": True,
        "step": step,
        "mlflow_run_id": run_id,
        "identity": cast("IdentityRecord", asdict(identity)),
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": _list_sizes(staging),
    }
    # Last of all: what is there before it does not count, whatever happens meanwhile.
    (staging / MARKER).write_text(json.dumps(content, indent=2))
    sync_folder(staging)
    target = run_folder / f"checkpoint-{step}"
    if target.exists():  # the same step again, after a resume: equal by construction
        _delete(target)
    # Within one folder, so that it is one operation of the file system: there or not there.
    staging.rename(target)
    # The folder's own entry reaches the disk too, or a power failure could undo the renaming.
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
    # With keep = 0 the slice [:-0] would be empty, while all of them are meant.
    for checkpoint in list_complete(run_folder)[: -keep or None]:
        if checkpoint.path != protect:
            _delete(checkpoint.path)
            removed.append(checkpoint.path)
    return removed


def _list_sizes(folder: Path) -> dict[str, int]:
    """Return the size in bytes of each file that a resume reads, by its path in the checkpoint."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in _NOT_READ)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _delete(folder: Path) -> None:
    """Delete a checkpoint, its marker first: a folder that is half deleted is not complete any more."""
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder)
