"""Whatever the rows are: each stands in one split or is dropped, and nothing that belongs together is parted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_tuning.data.arrays import number_by_appearance, number_equal
from lm_tuning.data.check.checked import CheckedRows
from lm_tuning.data.split.divide import LEFT_OUT, Division, divide_rows, key_order, take_rows
from lm_tuning.data.split.near_duplicates import NearDuplicates
from lm_tuning.errors import UserError
from lm_tuning.parameters.data import SplitParameters

SPLIT_OF_FILE = ("train", "validation", "test")


@dataclass
class Row:
    """What a row says, as small numbers: equal content, label, group, class and family of near duplicates."""

    file: int
    content: int
    label: int
    group: int
    stratum: int
    key: int

    @property
    def family(self) -> int:
        return self.content // 3


def checked(rows: list[Row]) -> CheckedRows:
    def digests(values: list[tuple[int, ...]]) -> np.ndarray:
        return np.array([[hash_of(value), hash_of((*value, 1))] for value in values], dtype=np.uint64)

    columns = {name: np.array([getattr(row, name) for row in rows]) for name in ("label", "group", "stratum")}
    numbered = {name: number_by_appearance(values.astype(np.int64)) for name, values in columns.items()}
    return CheckedRows(
        files=np.array([row.file for row in rows], dtype=np.int16),
        contents=digests([(row.content,) for row in rows]),
        wholes=digests([(row.content, row.label) for row in rows]),
        values=numbered,
        names={
            name: [str(values[first]) for first in np.sort(np.unique(numbered[name], return_index=True)[1])]
            for name, values in columns.items()
        },
        sources=[{"path": name, "split": name, "source": 0, "first_row_id": 1} for name in SPLIT_OF_FILE],
        keys=digests([(row.key, 0) for row in rows]),
    )


def hash_of(values: tuple[int, ...]) -> int:
    number = 88172645463325252
    for value in values:
        number = (number * 6364136223846793005 + value + 1442695040888963407) % 2**64
    return number ^ (number >> 29)


def divide(rows: list[Row], *, by_key: bool = False, **options: Any) -> Division:
    """Divide as the folder does: in the order of the keys, and back."""
    facts = checked(rows)
    row_ids = np.arange(1, len(rows) + 1)
    order = key_order(facts) if by_key else np.arange(len(rows))
    facts = take_rows(facts, order)
    if not by_key:
        facts.keys = None
    contents = number_equal(facts.contents)
    near = None
    if options.get("near_duplicates", "ignore") != "ignore":
        firsts = np.unique(contents, return_index=True)[1]
        families = number_by_appearance(np.array([rows[index].family for index in order[firsts]]))
        near = NearDuplicates(families, np.zeros((0, 2), dtype=np.int64), 1.0)
    seed, label = options.pop("seed", 0), options.pop("label", "label")
    division = divide_rows(
        facts,
        row_ids[order],
        contents=contents,
        wholes=number_equal(facts.wholes),
        near=near,
        label=label,
        split=SplitParameters(**{"validation": 0.2, "test": 0.2, **options}),
        seed=seed,
    )
    division.splits[order] = division.splits.copy()
    return division


def some_rows(files: st.SearchStrategy[int]) -> st.SearchStrategy[list[Row]]:
    small = st.integers(0, 5)
    row = st.builds(
        Row, file=files, content=st.integers(0, 40), label=small, group=small, stratum=small, key=st.just(0)
    )

    def with_keys(rows: list[Row]) -> list[Row]:
        for index, row in enumerate(rows):
            row.key = index
        return rows

    return st.lists(row, min_size=1, max_size=50).map(with_keys)


OPTIONS = st.fixed_dictionaries(
    {
        "group": st.sampled_from([None, "group"]),
        "stratify": st.sampled_from([None, "stratum"]),
        "duplicates": st.sampled_from(["keep_together", "drop", "ignore"]),
        "near_duplicates": st.sampled_from(["ignore", "report", "keep_together", "drop"]),
        "num_folds": st.sampled_from([None, None, 2, 3]),
        "seed": st.integers(0, 3),
        "by_key": st.booleans(),
    }
)


def sides(rows: list[Row], splits: np.ndarray, name: str) -> list[set[int]]:
    return [
        {getattr(row, name) for row, split in zip(rows, splits, strict=True) if split == index} for index in range(3)
    ]


def share_nothing(parts: list[set[int]]) -> bool:
    return not (parts[0] & parts[1] or parts[0] & parts[2] or parts[1] & parts[2])


@settings(max_examples=200, deadline=None)
@given(rows=some_rows(st.just(0)), options=OPTIONS)
def test_one_file_is_divided_without_leaks(rows, options):
    try:
        division = divide(rows, **options)
    except UserError:
        return
    splits, facts = division.splits, division.facts
    dropped = splits == LEFT_OUT
    exact, near = options["duplicates"], options["near_duplicates"]
    assert set(splits.tolist()) <= {LEFT_OUT, 0, 1, 2}
    assert (splits == 0).any()
    if options["group"]:
        assert share_nothing(sides(rows, splits, "group"))
    if exact != "ignore" or near in ("keep_together", "drop"):
        assert share_nothing(sides(rows, splits, "content"))
        assert facts["overlap"] == {"train_validation": 0, "train_test": 0, "validation_test": 0}
        assert all(facts["leakage"][name]["exact"]["num_rows"] == 0 for name in ("validation", "test"))
    if near in ("keep_together", "drop"):
        assert share_nothing(sides(rows, splits, "family"))
        assert facts["leakage"]["num_rows"] == 0
    if "drop" not in (exact, near):
        assert not dropped.any()
    kept = [row for row, is_dropped in zip(rows, dropped.tolist(), strict=True) if not is_dropped]
    if exact == "drop":
        assert len({(row.content, row.label) for row in kept}) == len(kept)
    if near == "drop":
        assert len({(row.family, row.label) for row in kept}) == len(kept)
        assert {(row.family, row.label) for row in kept} == {(row.family, row.label) for row in rows}
    if not options["group"] and exact == "ignore" and near in ("ignore", "report") and not options["num_folds"]:
        if not (options["stratify"] and facts["classes"]["only_in_train"]):
            counts = dict(zip(SPLIT_OF_FILE, np.bincount(splits, minlength=3).tolist(), strict=True))
            assert counts == facts["wanted_rows"]


@settings(max_examples=100, deadline=None)
@given(rows=some_rows(st.integers(0, 2)), options=OPTIONS)
def test_rows_of_held_out_files_never_move(rows, options):
    options["num_folds"] = None
    try:
        division = divide(rows, **options)
    except UserError:
        return
    for row, split in zip(rows, division.splits.tolist(), strict=True):
        assert split == row.file or (split == LEFT_OUT and options["duplicates"] == "drop") or row.file == 0
        if row.file == 0:
            assert split in (LEFT_OUT, 0)
    if options["near_duplicates"] == "drop" and options["duplicates"] != "drop":
        assert (division.splits != LEFT_OUT).sum() >= sum(row.file > 0 for row in rows)
        held_out = {(row.family, row.label) for row in rows if row.file}
        in_train = zip(rows, division.splits.tolist(), strict=True)
        assert not held_out & {(row.family, row.label) for row, split in in_train if split == 0}


@settings(max_examples=100, deadline=None)
@given(rows=some_rows(st.just(0)), options=OPTIONS, order=st.randoms(use_true_random=False))
def test_with_keys_any_order_of_the_rows_gives_the_same_division(rows, options, order):
    options["by_key"] = True
    mixed_up = list(rows)
    order.shuffle(mixed_up)
    try:
        first = divide(rows, **options)
    except UserError as error:
        try:
            divide(mixed_up, **options)
        except UserError as other:
            assert str(other) == str(error)
            return
        raise AssertionError("only one order was refused") from error
    second = divide(mixed_up, **options)
    split_of = {row.key: split for row, split in zip(rows, first.splits.tolist(), strict=True)}
    assert split_of == {row.key: split for row, split in zip(mixed_up, second.splits.tolist(), strict=True)}
    assert first.facts["folds"] == second.facts["folds"]
    if first.facts["classes"]:
        assert first.facts["classes"]["only_in_train"] == second.facts["classes"]["only_in_train"]


@settings(max_examples=60, deadline=None)
@given(rows=some_rows(st.just(0)), options=OPTIONS, num_folds=st.integers(2, 4))
def test_folds_partition_the_rows_outside_test(rows, options, num_folds):
    options["num_folds"] = num_folds
    try:
        divisions = [divide(rows, **{**options, "fold": fold}) for fold in range(num_folds)]
    except UserError:
        return
    assert all((division.splits == 2).tolist() == (divisions[0].splits == 2).tolist() for division in divisions)
    times_held_out = sum((division.splits == 1).astype(int) for division in divisions)
    assert times_held_out.max() == 1
    assert [(division.splits == 1).sum() for division in divisions] == divisions[0].facts["folds"]["num_rows_by_fold"]
    never = (times_held_out == 0) & (divisions[0].splits == 0)
    assert never.sum() == divisions[0].facts["folds"]["num_rows_always_in_train"] if not options["group"] else True


def test_the_kept_copy_is_the_one_with_the_smallest_key():
    rows = [Row(file=0, content=number % 4 * 3, label=0, group=0, stratum=0, key=number) for number in range(40)]
    keys = {number: hash_of((number, 0)) for number in range(40)}
    division = divide(rows, by_key=True, duplicates="drop", validation=1, test=0)
    kept = [row.key for row, split in zip(rows, division.splits.tolist(), strict=True) if split != LEFT_OUT]
    assert kept == sorted(min(range(start, 40, 4), key=keys.__getitem__) for start in range(4))


def test_cut_links_count_as_leaks_on_both_sides():
    rows = [Row(file=0, content=number * 3, label=0, group=0, stratum=0, key=number) for number in range(4)]
    rows[3].file = 2
    facts = checked(rows)
    facts.keys = None
    contents = number_equal(facts.contents)
    for links in ([[0, 3]], [[3, 0]]):
        near = NearDuplicates(np.arange(4), np.array(links), 1.0)
        division = divide_rows(
            facts,
            np.arange(1, 5),
            contents=contents,
            wholes=contents,
            near=near,
            label=None,
            split=SplitParameters(validation=0, test=0, near_duplicates="report"),
            seed=0,
        )
        assert division.facts["leakage"]["test"]["near"] == {"num_rows": 1, "first_row_ids": [4]}
        assert division.facts["near_duplicates"]["num_cut_links"] == 1
        assert "Links between near duplicates that were not followed" in division.warnings[0]
