"""Tell what became of the rows in splitting, for the data report and for tracking."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lm_tuning.data.findings import RowPlaces
from lm_tuning.data.mixing import rows_per_epoch
from lm_tuning.data.problems import shorten
from lm_tuning.data.rows import SPLITS
from lm_tuning.wording import count_of, escape_markdown

_MAX_CLASSES = 30
_MAX_ROWS = 20
_HELD_OUT = SPLITS[1:]

_HANDLING = {
    "keep_together": "kept on one side",
    "drop": "dropped but for one",
    "ignore": "ignored",
    "report": "reported only",
}


def build_splits_section(summary: Mapping[str, Any], copies: Mapping[str, npt.NDArray[np.int64]]) -> dict[str, Any]:
    """Make the section of the data report that tells of the splits.

    Args:
        summary: see ``write_splits``.
        copies: see ``read_copies``.

    Returns:
        ``facts`` for the JSON report, ``metrics`` by name, and ``markdown``.
    """
    names = (
        *("rows", "seed", "key", "wanted_rows", "folds", "duplicates", "near_duplicates", "overlap", "overlap_rows"),
        *("leakage", "groups", "classes", "untrained_classes", "sources", "label_map", "warnings"),
    )
    places = RowPlaces(summary["files"])
    blocks = [
        "## Splits",
        _splits_table(summary),
        *_folds(summary),
        *_duplicates(summary, copies, places),
        *_leakage(summary, places),
        *_groups(summary),
        *_classes(summary),
        *_untrained(summary, places),
        *_sources(summary),
        *_warnings(summary),
    ]
    return {
        "facts": {name: summary[name] for name in names}
        | {"copies": {kind: dict(places.by_file(ids)) for kind, ids in copies.items()}},
        "metrics": _metrics(summary),
        "markdown": "\n\n".join(blocks),
    }


def _metrics(summary: Mapping[str, Any]) -> dict[str, float]:
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


def _splits_table(summary: Mapping[str, Any]) -> str:
    rows, total = summary["rows"], sum(summary["rows"].values())
    way = f"by the key {_text(repr(summary['key']))} and seed" if summary["key"] else "by seed"
    lines = ([name, f"{rows[name]:,}", _share(rows[name], total)] for name in SPLITS)
    return f"Divided {way} {summary['seed']}.\n\n{_table(['split', 'rows', 'share'], lines)}"


def _folds(summary: Mapping[str, Any]) -> Iterator[str]:
    folds = summary["folds"]
    if folds:
        counts = ", ".join(f"{count:,}" for count in folds["num_rows_by_fold"])
        yield (
            f"Validation is fold {folds['fold']} of {folds['num_folds']} (counted from 0; rows by fold: {counts}); "
            f"in no fold and always in train: {count_of(folds['num_rows_always_in_train'], 'row')}."
        )


def _duplicates(
    summary: Mapping[str, Any], found: Mapping[str, npt.NDArray[np.int64]], places: RowPlaces
) -> Iterator[str]:
    yield "### Duplicates"
    copies, near = summary["duplicates"], summary["near_duplicates"]
    conflicts = copies["num_label_conflicts"]
    yield (
        f"Rows that repeat the text of another one, after trimming and NFC: {copies['num_copies']:,}; they are "
        f"{_HANDLING[copies['handling']]}, left out: {copies['num_dropped']:,}."
        + (f" Under another label: {conflicts:,}." if conflicts else "")
    )
    for kind, what in (("exact", "Copies"), ("near", "Near duplicates")):
        ids = found.get(kind, ())
        if len(ids):
            yield f"{what} of an earlier row: {_named(ids, len(ids), places)}."
    if not near:
        yield "Nobody looked for near duplicates (split.near_duplicates: ignore)."
        return
    yield (
        f"Near duplicates of another text before them (similarity {near['similarity']} or more): "
        f"{near['num_near_copies']:,} of {count_of(near['num_compared'], 'different text')}, in "
        f"{count_of(near['num_units'], 'unit')}; "
        f"they are {_HANDLING[near['handling']]}, left out: {count_of(near['num_dropped'], 'row')}. "
        f"Rate: {near['rows_per_second'] or 0:,} rows per second."
    )
    if near["largest"]:
        largest = near["largest"]
        yield f"The largest unit has {count_of(largest['num_rows'], 'row')}: {_listed(largest, places)}."


def _leakage(summary: Mapping[str, Any], places: RowPlaces) -> Iterator[str]:
    leakage, near = summary["leakage"], summary["near_duplicates"]
    yield "### Leakage"
    total = sum(summary["rows"][name] for name in _HELD_OUT)
    yield (
        f"{leakage['num_rows']:,} of {count_of(total, 'held-out row')} ({leakage['fraction']:.2%}) "
        f"{'stands' if leakage['num_rows'] == 1 else 'stand'} in train too, "
        f"as copies{' or near duplicates' if near else ''}."
    )
    items = [
        f"- {name}: {_share(side['num_rows'], summary['rows'][name])} of its rows ({side['num_rows']:,}) have {what} "
        f"in train: {_listed(side, places)}"
        for name in _HELD_OUT
        for kind, what in (("exact", "a copy"), ("near", "a near duplicate"))
        if (side := leakage[name][kind]) and side["num_rows"]
    ]
    if summary["overlap"]["validation_test"]:
        sides = summary["overlap_rows"]["validation_test"]
        items.append(
            f"- validation and test share {summary['overlap']['validation_test']:,} different contents: "
            f"{_listed(sides['validation'], places)} and {_listed(sides['test'], places)}"
        )
    if items:
        yield "\n".join(items)


def _groups(summary: Mapping[str, Any]) -> Iterator[str]:
    groups = summary["groups"]
    if groups:
        counts = ", ".join(f"{count:,} in {name}" for name, count in groups["num_groups_by_split"].items())
        largest = groups["largest"]
        yield f"### Groups: {_text(groups['column'])}"
        yield (
            f"{count_of(groups['num_groups'], 'group')}, each kept whole ({counts}); the largest, "
            f"{_text(largest['value'])}, has {count_of(largest['num_rows'], 'row')}."
        )


def _classes(summary: Mapping[str, Any]) -> Iterator[str]:
    classes = summary["classes"]
    if not classes:
        return
    yield f"### Classes: {_text(classes['column'])}"
    totals = {name: max(summary["rows"][name], 1) for name in SPLITS}
    lines = [
        [_text(label), *(f"{counts[name]:,} ({counts[name] / totals[name]:.2%})" for name in SPLITS)]
        for label, counts in list(classes["rows_by_split"].items())[:_MAX_CLASSES]
    ]
    yield _table(["class", *SPLITS], lines)
    if classes["num_classes"] > len(lines):
        yield (
            "Smaller classes that are in the JSON report (up to 1,000 in all): "
            f"{classes['num_classes'] - len(lines):,}."
        )


def _untrained(summary: Mapping[str, Any], places: RowPlaces) -> Iterator[str]:
    untrained = summary["untrained_classes"]
    if not untrained:
        return
    yield f"### Classes without a training row: {_text(untrained['column'])}"
    yield (
        "The division held out all rows of "
        f"{count_of(untrained['num_classes'], 'class')} ({_listed(untrained, places)}). They are never learned."
    )
    lines = [[_text(name), f"{count:,}"] for name, count in list(untrained["num_rows_by_class"].items())[:_MAX_CLASSES]]
    yield _table(["class", "held-out rows"], lines)
    if untrained["num_classes"] > len(lines):
        yield f"{untrained['num_classes'] - len(lines):,} more are in the JSON report (up to 1,000 in all)."


def _sources(summary: Mapping[str, Any]) -> Iterator[str]:
    sources = summary["sources"]
    if len(sources) > 1 or any(source["weight"] != 1 for source in sources):
        yield "### Sources"
        lines = (
            [
                _text(source["path"]),
                f"{source['weight']:g}",
                f"{source['num_rows']:,}",
                f"{rows_per_epoch(source['weight'], source['num_rows']):,}",
            ]
            for source in sources
        )
        yield _table(["source", "weight", "rows in train", "rows an epoch"], lines)


def _warnings(summary: Mapping[str, Any]) -> Iterator[str]:
    if summary["warnings"]:
        yield "### Warnings"
        yield "\n".join(f"- {_text(warning, 1000)}" for warning in summary["warnings"])


def _listed(rows: Mapping[str, Any], places: RowPlaces) -> str:
    return _named(rows["first_row_ids"], rows["num_rows"], places)


def _named(row_ids: Sequence[int] | npt.NDArray[np.int64], num_rows: int, places: RowPlaces) -> str:
    """Name the first rows of a list, each file once."""
    first = row_ids[:_MAX_ROWS]
    named = "; ".join(
        f"{_text(path, 300)}, rows {' · '.join(f'{number:,}' for number in numbers)}"
        for path, numbers in places.by_file(first)
    )
    return named + (f" and {num_rows - len(first):,} more" if num_rows > len(first) else "")


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    ruler = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ruler, *lines))


def _text(value: str, max_characters: int = 80) -> str:
    """Keep what a row says from being read as Markdown."""
    return escape_markdown(shorten(value, max_characters))


def _share(part: int, total: int) -> str:
    return f"{part / total:.2%}" if total else "0%"
