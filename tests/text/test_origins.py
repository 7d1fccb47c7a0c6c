"""Held-out rows know their file, row number, source and group, through splits and tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_tuning.data.split.folder import read_summary, write_splits
from lm_tuning.data.split.groups import read_groups
from lm_tuning.parameters.data import SplitParameters
from lm_tuning.text.store.origins import OriginKind, Origins, read_origins, write_origins
from lm_tuning.text.store.table import TokenTableWriter, open_split
from tests.support.raw_rows import check_rows, describe_raw


def write_rows(path: Path, start: int, count: int, **more: Any) -> Path:
    rows = [
        {"prompt": f"q{n}", "response": f"a{n}", "book": f"book {n % 7}", **more} for n in range(start, start + count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def split_rows(folder: Path, raw: dict[str, Any], **split: Any) -> Path:
    checked, splits = folder / "checked", folder / "splits"
    for made in (checked, splits):
        made.mkdir()
    settings = {"validation": 0, "test": 10, **split}
    check_rows(checked, raw, **settings)
    write_splits(splits, checked, SplitParameters(**settings))
    return splits


def store_tokens(folder: Path, splits: Path) -> Path:
    """Write a token for each row of the splits, as tokenizing does, and the origins."""
    from lm_tuning.data.store import open_examples

    folder.mkdir()
    for split in ("train", "validation", "test"):
        with TokenTableWriter(folder / f"{split}.arrow") as writer:
            for row_id in open_examples(splits, split).row_ids().tolist():
                writer.append(row_id, [9, 10], [(1, 2)])
    write_origins(folder, splits, read_summary(splits))
    return folder


def names_of(origins: Origins, row_ids: Any, kind: OriginKind) -> list[str | None]:
    parts = origins.parts_of(row_ids, kind)
    for name in parts.names:
        assert parts.rows_of(name).tolist() == np.flatnonzero(parts.indices == parts.names.index(name)).tolist() != []
    assert parts.rows_of("no such part").tolist() == []
    return [None if index < 0 else parts.names[index] for index in parts.indices.tolist()]


@pytest.mark.parametrize("more", [{}, {"key": "prompt"}])
def test_rows_drawn_from_two_sources_know_file_row_source_and_group(tmp_path: Path, more: dict[str, Any]) -> None:
    files = [write_rows(tmp_path / "one.jsonl", 0, 30), write_rows(tmp_path / "two.jsonl", 30, 30)]
    splits = split_rows(tmp_path, describe_raw(files), group="book", test=0.4, **more)
    tokens = store_tokens(tmp_path / "tokens", splits)
    origins = read_origins(tokens)
    assert origins is not None
    assert origins.group_column == "book"
    ids = open_split(tokens, "test").row_ids
    assert len(ids) > 10
    # Row ids count from 1 through both files.
    numbers = [row_id - 1 for row_id in ids.tolist()]
    expected = [(files[number // 30], number % 30 + 1, f"book {number % 7}") for number in numbers]
    assert [origins.describe(row_id) for row_id in ids.tolist()] == [f"{file}, row {row}" for file, row, _ in expected]
    assert names_of(origins, ids, "file") == [str(file) for file, _, _ in expected]
    assert names_of(origins, ids, "source") == [str(file) for file, _, _ in expected]
    assert names_of(origins, ids[::-1], "group") == [group for _, _, group in reversed(expected)]


def test_rows_of_a_held_out_file_have_no_source_and_without_groups_no_group(tmp_path: Path) -> None:
    train, test = write_rows(tmp_path / "train.jsonl", 0, 30), write_rows(tmp_path / "test.jsonl", 30, 5)
    splits = split_rows(tmp_path, describe_raw(train, test=test), test=0)
    assert read_groups(splits) is None
    origins = read_origins(store_tokens(tmp_path / "tokens", splits))
    assert origins is not None
    ids = np.arange(31, 36)
    assert origins.group_column is None
    assert names_of(origins, ids, "file") == [str(test)] * 5
    assert names_of(origins, ids, "source") == names_of(origins, ids, "group") == [None] * 5
    assert origins.describe(35) == f"{test}, row 5"


def test_tokens_of_earlier_versions_have_no_origins(tmp_path: Path) -> None:
    assert read_origins(tmp_path) is None
