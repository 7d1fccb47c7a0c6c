"""Describe what became of the rows in splitting, for the data report and for tracking."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from lm_tuning.data.check.account import rows_per_epoch
from lm_tuning.data.check.findings import RowPositions
from lm_tuning.data.records import HELD_OUT, SPLITS
from lm_tuning.data.split.class_shares import name_tied
from lm_tuning.data.split.copies import describe_conflict
from lm_tuning.data.split.records import LabelConflicts, LargestClasses, ListedRows, SplitsFacts, SplitsSummary
from lm_tuning.reporting.document import Block, Heading, Item, Items, Paragraph, ReportSection, Section, Table
from lm_tuning.reporting.markdown import write_section
from lm_tuning.reporting.text import write_share
from lm_tuning.wording import count_of, noun_for, shorten

_MAX_CLASSES = 30
_MAX_ROWS = 20
_MAX_CHARACTERS = 80
_MAX_SENTENCE = 1000

_HANDLING = {
    "keep_together": "kept on one side",
    "drop": "dropped but for one of each",
    "ignore": "ignored",
    "report": "reported only",
}


def build_splits_section(
    summary: SplitsSummary, copies: Mapping[str, npt.NDArray[np.int64]]
) -> ReportSection[SplitsFacts]:
    """Make the section of the data report that tells of the splits.

    Args:
        summary: see ``write_splits``.
        copies: see ``read_copies``.
    """
    positions = RowPositions(summary["files"])
    blocks: list[Block] = [
        *_split_rows(summary),
        *_folds(summary),
        *_duplicates(summary, copies, positions),
        *_leakage(summary, positions),
        *_groups(summary),
        *_classes(summary),
        *_untrained(summary, positions),
        *_sources(summary),
        *_warnings(summary),
    ]
    told = {name: value for name, value in summary.items() if name in SplitsFacts.__annotations__}
    by_file = {kind: dict(positions.by_file(ids)) for kind, ids in copies.items()}
    return {
        "facts": cast("SplitsFacts", told | {"copies": by_file}),
        "metrics": _metrics(summary),
        "markdown": write_section(Section("splits", "Splits", blocks)),
    }


def _metrics(summary: SplitsSummary) -> dict[str, float]:
    near = summary["near_duplicates"]
    metrics: dict[str, float] = {f"data_{name}_rows": summary["rows"][name] for name in SPLITS}
    metrics["data_duplicate_rows"] = summary["duplicates"]["num_copies"]
    if near:
        metrics["data_near_duplicate_rows"] = near["num_near_copies"]
    untrained = summary["untrained_classes"]
    if untrained:
        metrics["data_untrained_classes"] = untrained["num_classes"]
        metrics["data_untrained_class_rows"] = untrained["num_rows"]
    metrics["data_leakage_rows"] = summary["leakage"]["num_rows"]
    metrics["data_leakage_fraction"] = summary["leakage"]["fraction"]
    return metrics


def _split_rows(summary: SplitsSummary) -> Iterator[Block]:
    rows, total = summary["rows"], sum(summary["rows"].values())
    way = f"by the key {shorten(repr(summary['key']), _MAX_CHARACTERS)} and seed" if summary["key"] else "by seed"
    yield Paragraph(f"Divided {way} {summary['seed']}.")
    yield Table("", ("split", "rows", "share"), [(name, rows[name], write_share(rows[name], total)) for name in SPLITS])


def _folds(summary: SplitsSummary) -> Iterator[Block]:
    folds = summary["folds"]
    if folds:
        counts = ", ".join(f"{count:,}" for count in folds["num_rows_by_fold"])
        yield Paragraph(
            f"Validation is fold {folds['fold']} of {folds['num_folds']} (counted from 0; rows by fold: {counts}). "
            f"Rows in no fold, always in train: {folds['num_rows_always_in_train']:,}."
        )


def _duplicates(
    summary: SplitsSummary, found: Mapping[str, npt.NDArray[np.int64]], positions: RowPositions
) -> Iterator[Block]:
    yield Heading("Duplicates")
    copies, near = summary["duplicates"], summary["near_duplicates"]
    yield Paragraph(
        f"Rows that repeat the text of another one, after trimming and NFC: {copies['num_copies']:,}. Left out: "
        f"{copies['num_dropped']:,} (split.duplicates: {copies['handling']}"
        + (f", split.duplicates_by: {copies['by']}" if copies["conflicts"] and copies["handling"] == "drop" else "")
        + f"). Copies in the splits: {copies['num_kept']:,}."
    )
    kinds = {
        "left_out": "Left out, since another row has the same text",
        "exact": "Rows of the splits that repeat an earlier one there",
        "near": "Rows of the splits that are almost like an earlier one there",
    }
    # Near copies are there only if somebody looked for them.
    for kind, what in kinds.items():
        ids = found.get(kind, ())
        if len(ids):
            yield Paragraph(f"{what}: {_named(ids, len(ids), positions)}.")
    yield from _conflicts(copies["conflicts"], positions)
    if not near:
        yield Paragraph("Nobody looked for near duplicates (split.near_duplicates: ignore).")
        return
    yield Paragraph(
        f"Near duplicates of another text before them (similarity {near['similarity']} or more): "
        f"{near['num_near_copies']:,} of {count_of(near['num_compared'], 'different text')}, in "
        f"{count_of(near['num_units'], 'unit')}; they are {_HANDLING[near['handling']]}, left out: "
        f"{count_of(near['num_dropped'], 'row')}. "
        f"Rate: {near['rows_per_second'] or 0:,} rows per second."
    )
    if near["largest"]:
        largest = near["largest"]
        yield Paragraph(f"The largest unit has {count_of(largest['num_rows'], 'row')}: {_listed(largest, positions)}.")


def _conflicts(conflicts: LabelConflicts | None, positions: RowPositions) -> Iterator[Block]:
    """List the texts that were read under more than one label."""
    if not conflicts or not conflicts["num_texts"]:
        return
    counts = ", ".join(f"{count:,} in {name}" for name, count in conflicts["num_rows_by_split"].items() if count)
    if conflicts["num_rows_left_out"]:
        counts += f"{', ' if counts else ''}{conflicts['num_rows_left_out']:,} left out"
    yield Paragraph(
        f"Texts with more than one label: {conflicts['num_texts']:,}, in {count_of(conflicts['num_rows'], 'row')} "
        f"({counts}). No answer is right for all rows of such a text."
    )
    items = [Item(shorten(describe_conflict(one, positions), _MAX_SENTENCE)) for one in conflicts["first"]]
    more = conflicts["num_texts"] - len(items)
    yield Items([*items, *([Item(f"and {count_of(more, 'more text')}")] if more else [])])


def _leakage(summary: SplitsSummary, positions: RowPositions) -> Iterator[Block]:
    leakage, near = summary["leakage"], summary["near_duplicates"]
    yield Heading("Leakage")
    total = sum(summary["rows"][name] for name in HELD_OUT)
    yield Paragraph(
        f"Held-out rows that stand in train too, as copies{' or near duplicates' if near else ''}: "
        f"{leakage['num_rows']:,} of {total:,} ({leakage['fraction']:.2%})."
    )
    items = [
        f"{name}: rows with {what} in train: {side['num_rows']:,} "
        f"({write_share(side['num_rows'], summary['rows'][name])}): {_listed(side, positions)}"
        for name in HELD_OUT
        for side, what in ((leakage[name]["exact"], "a copy"), (leakage[name]["near"], "a near duplicate"))
        if side and side["num_rows"]
    ]
    if summary["overlap"]["validation_test"]:
        sides = summary["overlap_rows"]["validation_test"]
        items.append(
            f"validation and test share {count_of(summary['overlap']['validation_test'], 'text')}: "
            f"{_listed(sides['validation'], positions)} and {_listed(sides['test'], positions)}"
        )
    if items:
        yield Items([Item(item) for item in items])


def _groups(summary: SplitsSummary) -> Iterator[Block]:
    groups = summary["groups"]
    if groups:
        counts = ", ".join(f"{count:,} in {name}" for name, count in groups["num_groups_by_split"].items())
        largest = groups["largest"]
        yield _heading("Groups", groups["column"])
        yield Paragraph(
            f"{count_of(groups['num_groups'], 'group')}, each kept whole ({counts}); the largest, "
            f"{shorten(largest['value'], _MAX_CHARACTERS)}, has {count_of(largest['num_rows'], 'row')}."
        )


def _classes(summary: SplitsSummary) -> Iterator[Block]:
    """Show the classes of the labels, and of the strata where those are others."""
    shares, classes = summary["class_shares"], summary["classes"]
    if shares:
        yield _heading("Classes", shares["column"])
        yield Paragraph(" ".join(_largest(name, one) for name, one in shares["splits"].items() if one["num_rows"]))
        totals = {name: facts["num_rows"] for name, facts in shares["splits"].items()}
        yield from _class_table(shares["shown"], totals, num_classes=shares["num_classes"])
    # Strata are the classes of the labels as a rule, and then one table is enough.
    if classes and not (shares and classes["column"] == shares["column"]):
        yield _heading("Strata", classes["column"])
        shown = dict(list(classes["rows_by_split"].items())[:_MAX_CLASSES])
        yield from _class_table(shown, summary["rows"], num_classes=classes["num_classes"])


def _heading(what: str, column: str) -> Heading:
    return Heading(f"{what}: {shorten(column, _MAX_CHARACTERS)}")


def _largest(split: str, facts: LargestClasses) -> str:
    """Name the largest class of a split, and those that are as large."""
    first = facts["largest"][0]
    return (
        f"{split.capitalize()}: {count_of(facts['num_classes'], 'class')}, the largest "
        f"{name_tied(shorten(first['class'], _MAX_CHARACTERS), facts['num_largest'])} "
        f"({write_share(first['num_rows'], facts['num_rows'])})."
    )


def _class_table(
    shown: Mapping[str, Mapping[str, int]], totals: Mapping[str, int], *, num_classes: int
) -> Iterator[Block]:
    rows = [
        (
            shorten(label, _MAX_CHARACTERS),
            # A split without rows has 0.00% of each class.
            *(f"{counts[name]:,} ({write_share(counts[name], max(totals[name], 1))})" for name in SPLITS),
        )
        for label, counts in shown.items()
    ]
    yield Table("", ("class", *SPLITS), rows)
    if num_classes > len(rows):
        yield Paragraph(f"Smaller classes that are not shown: {num_classes - len(rows):,}.")


def _untrained(summary: SplitsSummary, positions: RowPositions) -> Iterator[Block]:
    untrained = summary["untrained_classes"]
    if not untrained:
        return
    yield _heading("Classes without a training row", untrained["column"])
    yield Paragraph(
        f"The division held out all rows of {count_of(untrained['num_classes'], 'class')} "
        f"({_listed(untrained, positions)}), so they are never learned."
    )
    rows = [
        (shorten(name, _MAX_CHARACTERS), count)
        for name, count in list(untrained["num_rows_by_class"].items())[:_MAX_CLASSES]
    ]
    yield Table("", ("class", "held-out rows"), rows)
    if untrained["num_classes"] > len(rows):
        more = untrained["num_classes"] - len(rows)
        yield Paragraph(f"{more:,} more are in the JSON report (up to 1,000 in all).")


def _sources(summary: SplitsSummary) -> Iterator[Block]:
    sources = summary["sources"]
    if len(sources) > 1 or any(source["weight"] != 1 for source in sources):
        yield Table(
            "Sources",
            ("source", "weight", "rows in train", "rows per epoch"),
            [
                (
                    shorten(source["path"], _MAX_CHARACTERS),
                    f"{source['weight']:g}",
                    source["num_rows"],
                    rows_per_epoch(source["weight"], source["num_rows"]),
                )
                for source in sources
            ],
        )


def _warnings(summary: SplitsSummary) -> Iterator[Block]:
    if summary["warnings"]:
        yield Heading("Warnings")
        yield Items([Item(shorten(warning, _MAX_SENTENCE)) for warning in summary["warnings"]])


def _listed(rows: ListedRows, positions: RowPositions) -> str:
    return _named(rows["first_row_ids"], rows["num_rows"], positions)


def _named(row_ids: Sequence[int] | npt.NDArray[np.int64], num_rows: int, positions: RowPositions) -> str:
    """Name the first rows of a list, each file once."""
    # By file, so that a path of a hundred letters is written once for all of its rows.
    first = row_ids[:_MAX_ROWS]
    named = "; ".join(
        f"{shorten(path, 300)}, {noun_for(len(numbers), 'row')} {' · '.join(map(str, numbers))}"
        for path, numbers in positions.by_file(first)
    )
    return named + (f" and {num_rows - len(first):,} more" if num_rows > len(first) else "")
