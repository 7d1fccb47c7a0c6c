"""Whether a checkpoint has all that a resume needs, found before a model is loaded.

transformers skips a file that is not there and goes on with a fresh optimizer, and a damaged file ends a run minutes
later in the words of some library. So every file is looked at first: whether it is there, whether it has the size that
was written, and whether it can be opened. Nothing is unpickled here, and torch is not needed.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NotRequired, get_args, get_origin, get_type_hints, is_typeddict

from lm_tuning.errors import UserError
from lm_tuning.json_types import JsonObject
from lm_tuning.training.checkpoints.format import (
    FORMAT_VERSION,
    MARKER,
    STEP_LOG,
    Checkpoint,
    MarkerRecord,
    UnreadableFileError,
    list_marked,
    list_unmarked,
    read_json_object,
    read_marker,
)
from lm_tuning.wording import count_of

TRAINER_STATE = "trainer_state.json"
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
# Every optimizer and every schedule of transformers has a state of its own, also those that keep nothing by weight.
STATE_FILES = ("optimizer.pt", "scheduler.pt", "rng_state.pth")

# Types by key. A key that ends with * has token or row there: whichever the task's losses are per.
Hints = Mapping[str, object]

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

# The facts that are calculated with after a resume; the others only stay in the report.
_FACTS: Hints = {"first_look_seconds": NotRequired[float], "steps_not_finite": NotRequired[list]}

_LOG: Hints = {"steps": list, "efficiency": list, "evaluations": list, "own_seconds": NotRequired[float]}

_UNITS = ("token", "row")
_MAX_SHOWN = 60

_KINDS: dict[object, tuple[str, Callable[[object], bool]]] = {
    str: ("a string", lambda value: isinstance(value, str)),
    Literal: ("a string", lambda value: isinstance(value, str)),
    bool: ("a boolean", lambda value: isinstance(value, bool)),
    # In Python a boolean is an integer; in JSON it is not.
    int: ("an integer", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    float: ("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool)),
    dict: ("a mapping", lambda value: isinstance(value, dict)),
    list: ("a list", lambda value: isinstance(value, list)),
}


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
        yield from find_misfits(health["facts"], _FACTS, "health.facts.")


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


def hints_of(record: Any) -> Hints:
    """Return the types of a ``TypedDict``'s keys; those that need not be there are marked as such."""
    hints = get_type_hints(record, include_extras=True)
    # Those of a class with total=False carry no mark of their own. The reverse holds too: a mark in an annotation that
    # is kept as text (from __future__ import annotations) is not among the optional keys.
    optional: frozenset[str] = getattr(record, "__optional_keys__", frozenset())
    return hints | {name: NotRequired[hints[name]] for name in optional}


def find_misfits(values: object, hints: Hints, prefix: str = "") -> Iterator[str]:
    """Name the keys that are missing or hold another type than they take; other keys are let pass.

    Args:
        values: as read.
        hints: what they should be.
        prefix: stands before the names of keys, with a dot at its end.
    """
    if not isinstance(values, dict):
        yield f"{prefix.removesuffix('.')} = {show(values)}, and it takes a mapping."
        return
    for key, hint in hints.items():
        names = [key[:-1] + unit for unit in _UNITS] if key.endswith("*") else [key]
        is_optional = get_origin(hint) is NotRequired
        name = next((name for name in names if name in values), None)
        if name is not None:
            yield from _find_in(values[name], get_args(hint)[0] if is_optional else hint, f"{prefix}{name}")
        elif not is_optional:
            yield f"{prefix}{' or '.join(names)} is missing."


def _find_in(value: object, hint: object, name: str) -> Iterator[str]:
    """Name a value that is none of its type, and what does not fit inside of it."""
    if NoneType in get_args(hint):
        choices = [each for each in get_args(hint) if each is not NoneType]
        if value is None or len(choices) > 1:  # several types mean any that JSON has
            return
        [hint] = choices
    if is_typeddict(hint):
        yield from find_misfits(value, hints_of(hint), f"{name}.")
        return
    kind = get_origin(hint) or hint
    takes, fits = _KINDS[kind]
    if not fits(value):
        yield f"{name} = {show(value)}, and it takes {takes}."
    elif isinstance(value, list) and get_args(hint):
        for index, inner in enumerate(value):
            yield from _find_in(inner, get_args(hint)[0], f"{name}[{index}]")
    elif isinstance(value, dict) and get_args(hint):
        for key, inner in value.items():
            yield from _find_in(inner, get_args(hint)[-1], f"{name}.{key}")


def show(value: object) -> str:
    """Write a value as far as a message has room for it."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
