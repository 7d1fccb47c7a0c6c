"""Whether a checkpoint has all that a resume needs, found before a model is loaded.

transformers skips a file that is not there and goes on with a fresh optimizer, and a damaged file ends a run minutes
later in the words of some library. So every file is looked at first: whether it is there, whether it has the size that
was written, and whether it can be opened. Nothing is unpickled here, and torch is not needed.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NotRequired

from lm_tuning.errors import UserError
from lm_tuning.json_types import JsonObject
from lm_tuning.training.checkpoints.format import (
    FORMAT_VERSION,
    MARKER,
    STEP_LOG,
    Checkpoint,
    UnreadableFileError,
    list_marked,
    list_unmarked,
    read_json_object,
    read_marker,
)
from lm_tuning.training.checkpoints.records import FactsRead, MarkerRecord
from lm_tuning.training.checkpoints.typed_values import Hints, find_misfits, hints_of, show
from lm_tuning.wording import count_of

TRAINER_STATE = "trainer_state.json"
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
# Every optimizer and every schedule of transformers has a state of its own, also those that keep nothing by weight.
STATE_FILES = ("optimizer.pt", "scheduler.pt", "rng_state.pth")

# What a resume reads of the rows in the log of the steps, by the name of their list.
_ROWS: dict[str, Hints] = {
    "steps": {"step": int, "loss_nats_per_*": float, "gradient_norm": float, "learning_rate": float},
    "efficiency": {
        "step": int,
        "seconds": float,
        "num_tokens": float,
        "num_rows": float,
        "padding_fraction": float,
        "loader_wait_seconds": float,
        "peak_memory_bytes": float,
    },
    "evaluations": {"step": int, "validation_nats_per_*": float},
}

_LOG: Hints = {"steps": list, "efficiency": list, "evaluations": list, "own_seconds": NotRequired[float]}


def require_latest(checkpoints: Path) -> Checkpoint:
    """Return the last complete checkpoint of the newest run that has one.

    One that is damaged is told and never passed over: going on from an older one loses steps, which the user decides.

    Args:
        checkpoints: folder of all runs of an output.

    Raises:
        UserError: there is none, or it is damaged.
    """
    for run in sorted(checkpoints.glob("run-*"), reverse=True):
        # Newest first, and no further than the first marked one that is whole or damaged.
        for step, folder in reversed(list_marked(run)):
            damage = list(find_damage(folder))
            if damage:
                raise UserError([*_describe_damage(folder, damage), _describe_ways_on(run, folder)])
            facts = read_marker(folder)
            if facts["complete"]:
                return Checkpoint(folder, step, facts)
    raise UserError(
        f"train.resume is true, but {checkpoints} holds no complete checkpoint. "
        "Start with train.resume=false and set train.save_every_steps."
    )


def list_passed_over(checkpoint: Checkpoint) -> list[Path]:
    """Return the folders of later checkpoints that have no marker: half written or half deleted.

    Args:
        checkpoint: that a run goes on from.
    """
    run = checkpoint.path.parent
    # Runs that were begun since, and ended before their first checkpoint was whole.
    later = [folder for folder in sorted(run.parent.glob("run-*")) if folder.name > run.name]
    unmarked = [path for step, path in list_unmarked(run) if step > checkpoint.step]
    return unmarked + [path for folder in later for _, path in list_unmarked(folder)]


def check_best(checkpoint: Checkpoint, best_metric: str) -> None:
    """Refuse to go on towards the best weights of a run where they are damaged.

    Args:
        checkpoint: that the run goes on from.
        best_metric: ``loss``, ``accuracy`` or ``macro_f1``. Where the best so far was found by another one, it is
            chosen again, and not by what stands in the marker.

    Raises:
        UserError: the best checkpoint so far is there and cannot be read.
    """
    best = checkpoint.facts.get("best")
    if best is None or ("loss" if best["metric"].startswith("nats_per_") else best["metric"]) != best_metric:
        return
    folder = checkpoint.path.parent / f"checkpoint-{best['step']}"
    if folder == checkpoint.path or folder not in [path for _, path in list_marked(folder.parent)]:
        return
    damage = list(find_damage(folder))
    if damage:
        raise UserError(
            [
                *_describe_damage(folder, damage),
                f"It has the best {best['metric']} so far, which train.load_best ends with. Copy its files again, set "
                "train.load_best=false, or move that folder elsewhere to choose among the others that are kept.",
            ]
        )


def find_damage(folder: Path) -> Iterator[str]:
    """Name each file of a checkpoint that no resume can use, and what is wrong with it; nothing for a whole one.

    Args:
        folder: of a checkpoint that has a marker. One that is marked as half written is not looked at.
    """
    try:
        facts = read_marker(folder)
    except UnreadableFileError as error:
        yield str(error)
        return
    if not facts["complete"]:
        return
    problems = list(_check_marker(facts))
    if problems:
        yield from (f"{MARKER}: {problem}" for problem in problems)
        return
    # Of earlier versions there are none, and a file is only opened.
    sizes = facts.get("files", {})
    for name in list_needed(folder, facts):
        problem = _check_file(folder, name, sizes.get(name), step=facts["step"])
        if problem is not None:
            yield f"{name} {problem}"


def list_needed(folder: Path, facts: MarkerRecord) -> list[str]:
    """Name the files that a resume reads.

    Args:
        folder: of the checkpoint.
        facts: of its marker. Those of earlier versions list no files, so the method says which there must be.
    """
    if not facts["identity"]["method"].startswith("full"):
        weights = [ADAPTER_CONFIG, ADAPTER_WEIGHTS]
    # The order in which transformers looks for them.
    elif (folder / WEIGHTS_INDEX).exists() and not (folder / WEIGHTS).exists():
        weights = [WEIGHTS_INDEX, *_list_shards(folder / WEIGHTS_INDEX)]
    else:
        weights = [WEIGHTS]
    read_if_there = [name for name in ("config.json", "scaler.pt") if (folder / name).exists()]
    return list(
        dict.fromkeys([*weights, *STATE_FILES, *read_if_there, TRAINER_STATE, STEP_LOG, *facts.get("files", {})])
    )


def _describe_damage(folder: Path, damage: list[str]) -> list[str]:
    return [f"train.resume: the checkpoint {folder} cannot be used.", *(f"  - {problem}" for problem in damage)]


def _describe_ways_on(run: Path, damaged: Path) -> str:
    """Name the checkpoint before a damaged one, and how to go on from it."""
    for step, folder in reversed(list_marked(run)):
        if folder != damaged and not list(find_damage(folder)) and read_marker(folder)["complete"]:
            return (
                f"Copy its files again if they are kept elsewhere. The checkpoint of step {step} of the same run is "
                f"whole: {folder}. To go on from it, move {damaged.name} out of {run} and give the same command again; "
                "the steps after it are made once more. train.resume=false starts a new run (nothing is deleted)."
            )
    return (
        "Copy its files again if they are kept elsewhere. This run has no other whole checkpoint; train.resume=false "
        "starts a new run (nothing is deleted)."
    )


def _check_marker(facts: MarkerRecord) -> Iterator[str]:
    version = facts.get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        yield (
            f"format_version = {show(version)}, and this version of the project reads {FORMAT_VERSION}: another one "
            "wrote it. Go on with that one."
        )
        return
    yield from find_misfits(facts, hints_of(MarkerRecord))
    health = facts.get("health")
    if isinstance(health, dict) and isinstance(health.get("facts"), dict):
        yield from find_misfits(health["facts"], hints_of(FactsRead), "health.facts.")


def _check_file(folder: Path, name: str, num_bytes: int | None, *, step: int) -> str | None:
    """Describe what is wrong with a file, half a sentence after its name; ``None`` for a sound one."""
    path = folder / name
    try:
        if not path.is_file():
            return "is no file." if path.exists() else "is missing."
        # Sizes first: a file cut short by a full disk or a broken copy is found without being read.
        found = path.stat().st_size
        if num_bytes is not None and found != num_bytes:
            return f"has {count_of(found, 'byte')}, and {num_bytes:,} were written."
        return _check_content(path, step)
    except UnreadableFileError as error:
        return str(error).removeprefix(f"{path.name} ")
    except OSError as error:
        return f"cannot be read ({error.strerror or error})."
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        return f"is damaged ({error})."


def _check_content(path: Path, step: int) -> str | None:
    """Open a file as far as it takes to see whether it is whole."""
    if path.suffix == ".safetensors":
        return _check_safetensors(path)
    if path.suffix in {".pt", ".pth"}:
        # torch.save writes a zip archive. Opening it reads its directory alone; loading it would unpickle what is
        # inside.
        with zipfile.ZipFile(path) as archive:  # its directory stands at the end, which a file cut short lacks
            return None if archive.namelist() else "is empty."
    return _check_json(path, step) if path.suffix == ".json" else None


def _check_safetensors(path: Path) -> str | None:
    """Read the header, which says where each tensor lies, and so whether the file is whole."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as opened:
            return None if opened.keys() else "holds no tensor."
    except SafetensorError as error:
        return f"is damaged ({error})."


def _check_json(path: Path, step: int) -> str | None:
    values = read_json_object(path)
    problems: list[str] = []
    if path.name == TRAINER_STATE:
        problems = list(find_misfits(values, {"global_step": int}))
        if not problems and values["global_step"] != step:
            problems = [f"global_step = {values['global_step']}, and the checkpoint is at step {step}."]
    elif path.name == STEP_LOG:
        problems = list(_check_step_log(values, step))
    return f"does not fit: {' '.join(problems)}" if problems else None


def _check_step_log(log: JsonObject, step: int) -> Iterator[str]:
    """Name what a resume would not find in the numbers of the steps so far; of each list the first bad row."""
    yield from find_misfits(log, _LOG)
    for name, hints in _ROWS.items():
        rows = log.get(name)
        if not isinstance(rows, list):
            continue
        found = (problem for index, row in enumerate(rows) for problem in find_misfits(row, hints, f"{name}[{index}]."))
        problem = next(found, None)
        # Evaluations come every so many steps; of the other lists a resume needs one row per step.
        numbers = [row.get("step") for row in rows if isinstance(row, dict)]
        if problem is not None:
            yield problem
        elif name != "evaluations" and numbers != [*range(1, step + 1)]:
            yield f"{name} has {count_of(len(rows), 'row')}, not one of each step from 1 to {step}."


def _list_shards(index: Path) -> list[str]:
    """Name the files that an index of weights leads to; none where it cannot be read, which is told of the index."""
    try:
        weight_map = read_json_object(index).get("weight_map")
    except UnreadableFileError:
        return []
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    return sorted({str(name) for name in names})
