"""What every comparison gives, and how the measurement of its base is kept, so that the base is measured once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lm_tuning.storage.digests import digest_values
from lm_tuning.storage.folders import FolderStore, StagedFolder

BASE_EVALUATION_VERSION = 3
"""Raise it when a model is measured in another way, so that older base evaluations are not reused."""

MEASUREMENT_NAME = "measurement.json"


@dataclass(frozen=True)
class Compared:
    """Two models on the same rows.

    Attributes:
        result: figures and samples, by the keys of the result.
        answers: one row each, with ``columns``.
        columns: names of the answers' values, in their order.
        base_evaluation: the measurement of the base, stored already or staged for it.
        warnings: what the user should know about the figures.
    """

    result: dict[str, Any]
    answers: list[dict[str, Any]]
    columns: tuple[str, ...]
    base_evaluation: StagedFolder | Path
    warnings: list[str] = field(default_factory=list)


def base_evaluation_key(**deciding: Any) -> str:
    """Return the key of a base evaluation.

    Args:
        **deciding: everything that its figures depend on.
    """
    return digest_values({"version": BASE_EVALUATION_VERSION, **deciding})


def read_base_evaluation(folder: Path) -> Any:
    """Read what :func:`stage_base_evaluation` wrote.

    Args:
        folder: a stored base evaluation.
    """
    return json.loads((folder / MEASUREMENT_NAME).read_text(encoding="utf-8"))


def stage_base_evaluation(
    cache: FolderStore, key: str, values: Any, *, columns: Sequence[str], rows: Sequence[Sequence[Any]]
) -> StagedFolder:
    """Write a base evaluation where publishing finds it.

    Args:
        cache: where base evaluations are kept.
        key: see :func:`base_evaluation_key`.
        values: the measurement; what ``json.dumps`` takes.
        columns: titles of the preview.
        rows: the preview's rows.
    """
    staged = cache.stage(key)
    (staged.path / MEASUREMENT_NAME).write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    preview = {"columns": list(columns), "data": [list(row) for row in rows]}
    (staged.path / "preview.json").write_text(json.dumps(preview, ensure_ascii=False), encoding="utf-8")
    return staged
