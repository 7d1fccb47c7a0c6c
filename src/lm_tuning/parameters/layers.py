"""Settings of which one takes the place of another: what is set in the nearer layer wins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lm_tuning.parameters.sources import Sources

# Of each set one alternative can hold. Layers, the nearest first: --params, the environment's folder, conf/base.
_ALTERNATIVES: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("train.effective_batch_rows",), ("train.effective_batch_tokens",)),
    (
        ("data.columns.text",),
        ("data.columns.prompt", "data.columns.response", "data.columns.system"),
        ("data.columns.messages", "data.columns.tools"),
    ),
    (("split.num_folds",), ("data.validation_path",)),
)


def settle_alternatives(raw: Mapping[str, Any], sources: Sources) -> tuple[dict[str, Any], list[str]]:
    """Take out settings that one in a nearer layer replaces.

    ``conf/base`` sets ``train.effective_batch_tokens``; a user who sets ``train.effective_batch_rows`` on top means it
    in its place. Two alternatives in one layer are left as they are: that is a contradiction, told by the checks.

    Args:
        raw: the merged parameters as plain values, by group and key.
        sources: where they were written.

    Returns:
        The parameters, with null in place of what was replaced, and a line for each replacement.
    """
    settled, lines = dict(raw), []
    for alternatives in _ALTERNATIVES:
        chosen = [[key for key in keys if _value(settled, key) is not None] for keys in alternatives]
        layers = [min((sources.layer(key.split(".")) for key in keys), default=None) for keys in chosen]
        known = [layer for layer in layers if layer is not None]
        if len(known) < 2 or known.count(min(known)) > 1:
            continue
        nearest = layers.index(min(known))
        winner = chosen[nearest][0]
        for keys in (keys for position, keys in enumerate(chosen) if position != nearest):
            for key in keys:
                lines.append(
                    f"{_show(settled, winner, sources)} takes the place of {_show(settled, key, sources)}: only one of "
                    "them can hold."
                )
                _set_null(settled, key)
    return settled, lines


def _value(raw: Any, key: str) -> Any:
    for part in key.split("."):
        raw = raw.get(part) if isinstance(raw, Mapping) else None
    return raw


def _show(raw: Mapping[str, Any], key: str, sources: Sources) -> str:
    source = sources.find(key.split("."))
    return f"{key} = {_value(raw, key)}" + (f" ({source.place})" if source else "")


def _set_null(raw: dict[str, Any], key: str) -> None:
    """Set a key to None in copies of its groups, since the configuration loader keeps the groups themselves."""
    *groups, last = key.split(".")
    for group in groups:
        raw[group] = dict(raw[group])
        raw = raw[group]
    raw[last] = None
