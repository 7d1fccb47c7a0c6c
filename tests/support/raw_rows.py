"""Descriptions of raw files as the example-data pipeline hands them on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_tuning.data.check.checked import write_checked_rows
from lm_tuning.parameters.data import DataParameters, SplitParameters

Paths = Path | Sequence[Path]


def describe_raw(
    train: Paths, *, validation: Paths | None = None, test: Paths | None = None, weights: Sequence[float] | None = None
) -> dict[str, Any]:
    """Describe local files; every training file is a source of its own."""
    listed = {"train": _listed(train), "validation": _listed(validation), "test": _listed(test)}
    return {
        split: [_describe(path, index if split == "train" else -1) for index, path in enumerate(paths)] or None
        for split, paths in listed.items()
    } | {
        "sources": [
            {"path": str(path), "weight": weights[index] if weights else 1.0, "num_files": 1}
            for index, path in enumerate(listed["train"])
        ],
        "is_example": False,
    }


def _listed(paths: Paths | None) -> list[Path]:
    if paths is None:
        return []
    return [paths] if isinstance(paths, Path) else list(paths)


def _describe(path: Path, source: int) -> dict[str, Any]:
    return {
        "path": path.as_posix(),
        "format": path.suffix[1:],
        "compression": None,
        "num_bytes": path.stat().st_size,
        "digest": "0" * 64,
        "source": source,
    }


def parameters(settings: dict[str, Any]) -> tuple[DataParameters, SplitParameters]:
    """Give each setting to the group of parameters that has it."""
    division = {name: settings[name] for name in SplitParameters.model_fields.keys() & settings.keys()}
    reading = {name: value for name, value in settings.items() if name not in division}
    return DataParameters(**reading), SplitParameters(**division)


def check_rows(folder: Path, raw: dict[str, Any], *, task: str = "causal_lm", **settings: Any) -> dict[str, Any]:
    """Check rows with the settings given, which are parameters of `data` and `split`."""
    run = {name: settings.pop(name) for name in ("on_progress",) if name in settings}
    return write_checked_rows(folder, raw, *parameters(settings), task=task, **run)
