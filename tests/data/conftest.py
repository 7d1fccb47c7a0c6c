"""Files of rows, written by hand or taken from the real data sets."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.data.check.checked import write_checked_rows
from lm_tuning.data.sources.describe import describe_files
from lm_tuning.data.split.folder import write_splits
from lm_tuning.data.store import open_examples
from lm_tuning.errors import UserError
from tests.support.raw_rows import parameters

REAL_DATA = Path(os.environ.get("LM_TUNING_TEST_DATA", Path(__file__).parents[2] / "../shared/data"))


@pytest.fixture
def real_data() -> Callable[[str], Path]:
    """Find a real file, or skip and say why."""

    def find(name: str) -> Path:
        path = REAL_DATA / name
        if not path.exists():
            pytest.skip(f"{path} is not there (LM_TUNING_TEST_DATA names another folder)")
        return path

    return find


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Write dicts as JSON Lines."""

    def write(rows: Sequence[Any], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


class SplitResult:
    """A written folder, its summary, and its rows by split."""

    def __init__(self, folder: Path, summary: dict[str, Any], checked: Path) -> None:
        self.folder = folder
        self.checked = checked
        self.summary = summary
        self.rows = {name: open_examples(folder, name).head(10**9) for name in ("train", "validation", "test")}

    def ids(self, split: str) -> list[int]:
        return [row["row_id"] for row in self.rows[split]]

    def column(self, name: str) -> list[Any]:
        """All values in the order of the row ids."""
        rows = sorted((row for rows in self.rows.values() for row in rows), key=lambda row: row["row_id"])
        return [row[name] for row in rows]


@pytest.fixture
def split(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., SplitResult]:
    """Check files and split them with the settings given, nothing held out unless asked."""

    def make(
        train: Any, *, validation_path: Path | None = None, test_path: Path | None = None, **settings: Any
    ) -> SplitResult:
        paths = {"train": train, "validation": validation_path, "test": test_path}
        files = describe_files(**{name: str(path) if isinstance(path, Path) else path for name, path in paths.items()})
        task = settings.pop("task", "causal_lm")
        run = {name: settings.pop(name) for name in ("seed", "on_progress") if name in settings}
        data, division = parameters({"validation": 0, "test": 0, **settings})
        checked, folder = tmp_path_factory.mktemp("rows"), tmp_path_factory.mktemp("splits")
        refused = write_checked_rows(checked, files, data, division, task=task)["refused"]
        if refused:
            raise UserError(refused)
        summary = write_splits(folder, checked, division, task=task, **run)
        return SplitResult(folder, summary, checked)

    return make
