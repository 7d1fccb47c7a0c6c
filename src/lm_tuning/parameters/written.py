"""How keys, values and alternatives are written in messages about parameters."""

from __future__ import annotations

from collections.abc import Sequence

from lm_tuning.secrets import mask

KeyPath = tuple[str | int, ...]

_MAX_CHARACTERS = 80


def write_path(path: Sequence[str | int]) -> str:
    """Write a path as people type it, such as ``train.lora.target_modules[1]``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def write_value(value: object) -> str:
    """Write a value as it would stand in YAML, shortened where it is long."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = mask(repr(value))  # before it is cut: half of an address does not show that it holds a password
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + "..."


def join_words(words: Sequence[str], always_comma: bool = False) -> str:
    """Join alternatives as ``a, b or c``; ``always_comma`` keeps phrases that hold an ``or`` of their own apart."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])}{',' if always_comma else ''} or {words[-1]}"
