"""Tables and models for the evaluation tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lm_tuning.text.store.table import TokenTable
from tests.support.stored import Row, write_rows
from tests.support.tiny import save_tiny_model


@pytest.fixture
def write_table(tmp_path: Path) -> Callable[..., TokenTable]:
    """Write rows of (ids, spans) as a token file; row ids count from 100."""

    def write(rows: Sequence[Row], path: Path | None = None) -> TokenTable:
        return write_rows(rows, path or tmp_path / "validation.arrow")

    return write


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("base"))
