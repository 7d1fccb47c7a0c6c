"""Fixtures of several packages: a token table and a base model.

It is loaded before the tests' environment is set, so what it needs is imported inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lm_tuning.text.store.table import TokenTable
    from tests.support.stored import Row


@pytest.fixture
def write_table(tmp_path: Path) -> Callable[..., TokenTable]:
    """Write rows of (ids, spans) as a token file; row ids count from 100."""
    from tests.support.stored import write_rows

    def write(rows: Sequence[Row], path: Path | None = None) -> TokenTable:
        return write_rows(rows, path or tmp_path / "validation.arrow")

    return write


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with the character tokenizer."""
    from tests.support.tiny import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("base"))
