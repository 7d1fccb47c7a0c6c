"""Figures by group, source and file are those of the part's rows alone, however many parts there are."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from lm_tuning.evaluation.parts import MAX_PARTS, figures_by_part
from lm_tuning.evaluation.statistics.scored_rows import ScoredRows, mean_of_rows
from lm_tuning.text.store.origins import Origins

NUM_ROWS = 40


def origins_of(**names: list[str | None]) -> Origins:
    ids = np.arange(len(names["file"])) * 3
    columns = {kind: pa.array(values, pa.string()).dictionary_encode() for kind, values in names.items()}
    return Origins(pa.table({"row_id": ids, "row": ids + 1, **columns}))


def scored(row_ids: np.ndarray[tuple[int], np.dtype[np.int64]], seed: int) -> tuple[ScoredRows, ScoredRows]:
    generator = np.random.default_rng(seed)
    return tuple(mean_of_rows("x", generator.random(len(row_ids)), row_ids) for _ in range(2))  # type: ignore[return-value]


def test_each_part_has_the_figures_of_its_rows() -> None:
    ids = np.arange(NUM_ROWS) * 3
    files: list[str | None] = ["b" if index % 4 else "a" for index in range(NUM_ROWS)]
    groups: list[str | None] = ["only one" if index < 5 else None for index in range(NUM_ROWS)]
    scores = {"loss": scored(ids, 0), "rouge_l": scored(ids[1:3], 1)}
    parts = figures_by_part(scores, origins_of(file=files, source=files, group=groups))
    # A single group is no comparison, and files that are the sources are told once.
    assert [(part["by"], part["name"], part["num_rows"]) for part in parts] == [
        ("source", "b", 30),
        ("source", "a", 10),
    ]
    for part in parts:
        rows = [index for index, name in enumerate(files) if name == part["name"]]
        for name, side in (("base", 0), ("tuned", 1)):
            expected = scores["loss"][side].row_values[rows].mean()
            assert part[name]["loss"] == pytest.approx(expected)  # type: ignore[literal-required]
    assert parts[0]["base"]["rouge_l"] == pytest.approx(scores["rouge_l"][0].value)
    assert parts[1]["base"]["rouge_l"] is None, "no row of this part was answered"


def test_the_parts_with_the_most_rows_are_told() -> None:
    names: list[str | None] = [*(f"g{index:03}" for index in range(2 * MAX_PARTS)), "g099"]
    nothing: list[str | None] = [None] * len(names)
    ids = np.arange(len(names)) * 3
    parts = figures_by_part({"loss": scored(ids, 0)}, origins_of(file=nothing, source=nothing, group=names))
    assert [part["name"] for part in parts] == ["g099", *(f"g{index:03}" for index in range(MAX_PARTS - 1))]
