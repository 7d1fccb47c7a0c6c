"""Ways in which a stored checkpoint is not what was written, and what must be said of each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARKER = "lm_tuning_checkpoint.json"
Damage = tuple[Callable[[Path], object], tuple[str, ...]]


def cut(path: Path) -> None:
    """Leave half of a file, as a copy that broke off does."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def change(path: Path, edit: Callable[[Any], Any]) -> None:
    """Write a JSON file with something changed; ``edit`` changes it in place or returns what to write."""
    values = json.loads(path.read_text(encoding="utf-8"))
    changed = edit(values)
    path.write_text(json.dumps(values if changed is None else changed), encoding="utf-8")


def forget_files(folder: Path) -> None:
    """Make a checkpoint one of the first versions, which list no files and name no format."""
    change(folder / MARKER, without("files", "format_version"))


def without(*names: str) -> Callable[[Any], Any]:
    return lambda values: {name: value for name, value in values.items() if name not in names}


def having(**changed: Any) -> Callable[[Any], Any]:
    return lambda values: {**values, **changed}


def marker(edit: Callable[[Any], Any]) -> Callable[[Path], object]:
    return lambda folder: change(folder / MARKER, edit)


def unlisted(name: str, edit: Callable[[Any], Any]) -> Callable[[Path], object]:
    """Return what changes a JSON file of a checkpoint that does not list the sizes of its files."""

    def damage(folder: Path) -> None:
        forget_files(folder)
        change(folder / name, edit)

    return damage


def missing(name: str) -> Damage:
    return lambda folder: (folder / name).unlink(), (f"{name} is missing.",)


def short(name: str, *words: str) -> Damage:
    """Return a file that was cut short in a checkpoint that does not list sizes."""

    def damage(folder: Path) -> None:
        forget_files(folder)
        cut(folder / name)

    return damage, (f"{name} is damaged", *words)


def short_by_size(name: str) -> Damage:
    return lambda folder: cut(folder / name), (f"{name} has ", " were written.")


STATE = ("optimizer.pt", "scheduler.pt", "rng_state.pth")

DAMAGES: dict[str, Damage] = {
    **{f"no {name}": missing(name) for name in (*STATE, "trainer_state.json", "step_log.json")},
    **{f"half of {name}": short(name) for name in (*STATE, "trainer_state.json", "step_log.json")},
    **{f"half of listed {name}": short_by_size(name) for name in (*STATE, "step_log.json")},
    "marker is no JSON": (lambda folder: (folder / MARKER).write_text("{"), (f"{MARKER} is damaged: it is no JSON",)),
    "marker is empty": (lambda folder: (folder / MARKER).write_text(""), (f"{MARKER} is damaged: it is no JSON",)),
    "marker is not UTF-8": (
        lambda folder: (folder / MARKER).write_bytes(b'{"complete": true, "step": 2, "\xff": 1}'),
        (f"{MARKER} is damaged: it is no text in UTF-8.",),
    ),
    "marker is a list": (marker(lambda _: [1]), (f"{MARKER} is damaged: it holds no JSON object but a list.",)),
    "marker is a number": (marker(lambda _: 3), ("it holds no JSON object but a number.",)),
    "marker without complete": (marker(without("complete")), (f"{MARKER}: complete is missing or no boolean.",)),
    "marker without identity": (marker(without("identity")), (f"{MARKER}: identity is missing.",)),
    "marker without step": (marker(without("step")), (f"{MARKER}: step is missing",)),
    "step is a string": (marker(having(step="2")), (f"{MARKER}: step is '2'",)),
    "step is a fraction": (marker(having(step=2.5)), (f"{MARKER}: step is 2.5",)),
    "step is another one": (marker(having(step=7)), (f"{MARKER}: step is 7, and the folder's name is checkpoint-",)),
    "identity is a string": (marker(having(identity="x")), (f"{MARKER}: identity = 'x', and it takes a mapping.",)),
    "identity without method": (
        marker(lambda facts: having(identity=without("method")(facts["identity"]))(facts)),
        (f"{MARKER}: identity.method is missing.",),
    ),
    "several keys": (
        marker(having(health_seconds="long", best={"metric": 3})),
        (
            f"{MARKER}: health_seconds = 'long', and it takes a number.",
            f"{MARKER}: best.metric = 3, and it takes a string.",
            f"{MARKER}: best.step is missing.",
        ),
    ),
    "health without facts": (marker(having(health={"findings": [3]})), ("health.facts is missing", "findings[0] = 3")),
    "frozen parts are a string": (
        marker(having(freeze="layers.0")),
        (f"{MARKER}: freeze = 'layers.0', and it takes a list.",),
    ),
    "a frozen part is a number": (
        marker(having(freeze=["layers.0", 3])),
        (f"{MARKER}: freeze[1] = 3, and it takes a string.",),
    ),
    "later format": (marker(having(format_version=2)), (f"{MARKER}: format_version = 2, and this version",)),
    "log of other keys": (
        unlisted("step_log.json", lambda _: {"rows": []}),
        ("steps is missing", "efficiency is missing"),
    ),
    "log is a list": (
        unlisted("step_log.json", lambda log: [log]),
        ("step_log.json is damaged: it holds no JSON",),
    ),
    "log of fewer steps": (
        unlisted("step_log.json", lambda log: having(steps=log["steps"][:-1])(log)),
        ("step_log.json does not fit: steps has 1 row, not one of each step from 1 to 2.",),
    ),
    "log of other columns": (
        unlisted(
            "step_log.json", lambda log: having(steps=[without("gradient_norm")(row) for row in log["steps"]])(log)
        ),
        ("step_log.json does not fit: steps[0].gradient_norm is missing.",),
    ),
    "state of another step": (
        unlisted("trainer_state.json", having(global_step=1)),
        ("trainer_state.json does not fit: global_step = 1, and the checkpoint is at step 2.",),
    ),
}
"""Of a checkpoint of step 2, by name: what damages its folder, and words of the message."""

DAMAGES_OF_METHOD: dict[str, dict[str, Damage]] = {
    "full": {
        "no weights": missing("model.safetensors"),
        "half of the weights": short("model.safetensors"),
        "half of the listed weights": short_by_size("model.safetensors"),
    },
    "lora": {
        "no adapter": missing("adapter_model.safetensors"),
        "no adapter config": missing("adapter_config.json"),
        "half of the adapter": short("adapter_model.safetensors"),
        "half of the listed adapter": short_by_size("adapter_model.safetensors"),
    },
}
