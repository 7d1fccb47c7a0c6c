"""The section ``rows`` of the data report: what was read, as what, and what became of every row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import cast

from lm_tuning.data.check.account import ALWAYS_SKIPPED
from lm_tuning.data.format.examples import JSON_FIELDS
from lm_tuning.data.records import (
    CheckedClasses,
    ClassCounts,
    FileRows,
    FindingsByKind,
    RowsFacts,
    RowsSummary,
    TextLength,
    UnbegunFile,
    UnreadSummary,
)
from lm_tuning.reporting.document import (
    Block,
    Code,
    Heading,
    Inline,
    Item,
    Items,
    Paragraph,
    Preformatted,
    ReportSection,
    Section,
    Strong,
    Table,
    Words,
)
from lm_tuning.reporting.markdown import write_section
from lm_tuning.reporting.text import shorten_path, write_share
from lm_tuning.wording import count_of, name_first, shorten

_MAX_SHOWN_ROWS = 20
_MAX_SHOWN_CLASSES = 30
_MAX_SHOWN_FILES = 50
_MAX_SHOWN_CHARACTERS = 300
_MAX_NAME_CHARACTERS = 60
_OUTCOMES = {"skipped": "left out", "refused": "refused: nothing is trained on before they are fixed", "kept": "kept"}


def build_rows_section(summary: RowsSummary | UnreadSummary, findings: FindingsByKind) -> ReportSection[RowsFacts]:
    """Write the section of a folder of checked rows.

    Args:
        summary: see ``write_checked_rows``.
        findings: see ``read_findings``.
    """
    counts = summary["num_rows"]
    bad_fraction = counts["skipped"] / counts["read"] if counts["read"] else 0.0
    # Rows that an earlier version has checked have no lengths, and those that were not read to the end none either.
    unknown = {"text_lengths": None, "is_unread": False}
    told = {name: value for name, value in summary.items() if name in RowsFacts.__annotations__}
    facts = cast("RowsFacts", unknown | told | {"bad_fraction": bad_fraction, "findings": findings})
    metrics = {
        "data_rows_read": counts["read"],
        "data_rows_kept": counts["kept"],
        "data_rows_skipped": counts["skipped"],
        "data_bad_fraction": bad_fraction,
        **{f"data_finding_{kind}": found["num_rows"] for kind, found in findings.items()},
    }
    section = Section("rows", "Rows", list(_blocks(facts)))
    return {"facts": facts, "metrics": metrics, "markdown": write_section(section)}


def _blocks(facts: RowsFacts) -> Iterator[Block]:
    is_unread, findings = facts["is_unread"], facts["findings"]
    yield Paragraph(_told_counts(facts))
    limit = describe_row_limit(facts["max_rows"], map(count_rows_in_file, facts["files"]))
    if limit is not None:
        yield Paragraph(limit)
    if facts["refused"]:
        yield Paragraph((Strong("The run stopped here"), ", for this reason:"))
        yield Items(_first(map(Item, facts["refused"]), len(facts["refused"])))
    if facts["format"] is not None:
        yield Paragraph(("Read as ", Code(facts["format"]), f": {facts['reading']}."))
    if facts["template"]:
        yield Preformatted(facts["template"], "The template:")
    if facts["not_used"]:
        yield Paragraph(f"Columns that nothing reads: {', '.join(map(repr, facts['not_used']))}.")
    yield from _file_blocks(facts["files"])
    if len(facts["mixing"]) > 1 or any(source["weight"] != 1 for source in facts["mixing"]):
        yield Table(
            "Sources",
            ("Source", "Weight", "Rows", "Rows per epoch, before any are held out"),
            [(one["path"], f"{one['weight']:g}", one["num_rows"], one["rows_per_epoch"]) for one in facts["mixing"]],
        )
    yield from _length_blocks(facts["text_lengths"])
    if facts["classes"]:
        yield from _class_blocks(facts["classes"], facts["label_map"] or {})
    # Last, since it is the longest part, and the figures above are of use without it.
    yield Heading("Findings")
    classes = facts["classes"]
    has_mixed_labels = classes is not None and len(classes.get("types", ())) > 1
    if classes and has_mixed_labels:
        yield _mixed_labels(classes)
    if findings:
        yield from _finding_blocks(findings)
    elif not has_mixed_labels:
        nothing = "None: nothing is unusual about any row."
        yield Paragraph("None in the rows that were read." if is_unread else nothing)


def _told_counts(facts: RowsFacts) -> Inline:
    counts = facts["num_rows"]
    if facts["is_unread"]:
        return (
            Strong("The rows could not be read to the end."),
            " Nothing below is about a whole set of rows, and nothing is trained on. Rows read before: ",
            Strong(f"{counts['read']:,}"),
            "; bad ones among them: ",
            Strong(f"{counts['skipped']:,}"),
            ".",
        )
    return (
        f"Rows read from {count_of(len(facts['files']), 'file')}: ",
        Strong(f"{counts['read']:,}"),
        ". Good ones: ",
        Strong(f"{counts['kept']:,}"),
        ". ",
        *_told_bad(facts),
    )


def _told_bad(facts: RowsFacts) -> tuple[Words, ...]:
    counts = facts["num_rows"]
    if not counts["skipped"]:
        return ("None is bad.",)
    num_bad, share = Strong(f"{counts['skipped']:,}"), write_share(counts["skipped"], counts["read"])
    if facts["on_bad_row"] == "error":
        return "Bad ones: ", num_bad, f" ({share}); data.on_bad_row: error lets none pass."
    limit = f"data.max_bad_fraction lets {facts['max_bad_fraction']:.2%} pass"
    if facts["max_bad_fraction"]:
        limit += f", and up to {ALWAYS_SKIPPED} rows of a file whatever their share"
    return "Bad ones, left out: ", num_bad, f" ({share}); {limit}."


def _file_blocks(files: Sequence[FileRows | UnbegunFile]) -> Iterator[Block]:
    yield Table(
        "Files",
        ("File", "Split", "Rows read", "Good", "Bad", "First row id"),
        [(shorten_path(file["path"]), file["split"], *_counts_of_file(file)) for file in files[:_MAX_SHOWN_FILES]],
        text_columns=(0, 1),
    )
    if len(files) > _MAX_SHOWN_FILES:
        yield Paragraph(f"and {count_of(len(files) - _MAX_SHOWN_FILES, 'more file')}.")
    exploded = [file for file in files if "exploded" in file]
    yield from map(_exploded, exploded[:_MAX_SHOWN_FILES])


def _counts_of_file(file: FileRows | UnbegunFile) -> tuple[int | str, ...]:
    """Return the last four cells of a file's line; dashes where reading was not begun."""
    # Dashes rather than zeros: nothing is known of a file that was not begun.
    if file["rows_read"] is None:
        return ("-",) * 4
    return file["rows_read"], file["rows_kept"], sum(file["rows_skipped"].values()), file["first_row_id"]


def _exploded(file: FileRows) -> Paragraph:
    """Describe what became of the lists of a file that were exploded."""
    told = file["exploded"]
    before, after = count_of(told["rows_in_file"], "row"), count_of(file["rows_read"], "row")
    lists = [part for name in told["lists"] for part in (", ", Code(name))][1:]
    empty = ""
    if told["rows_with_empty_lists"]:
        named = ", ".join(map(str, told["first_rows_with_empty_lists"]))
        more = told["rows_with_empty_lists"] - len(told["first_rows_with_empty_lists"])
        empty = (
            f" An empty list, which gives no row, is in {count_of(told['rows_with_empty_lists'], 'row')} of the "
            f"file: {named}{f' and {more:,} more' if more else ''}."
        )
    return Paragraph(
        (
            f"{shorten_path(file['path'])}: {before} of the file became {after} by data.explode (",
            *lists,
            f"). Row numbers here count the rows after it.{empty}",
        )
    )


def _length_blocks(lengths: dict[str, TextLength] | None) -> Iterator[Block]:
    if lengths:
        yield Table(
            "Lengths of texts, in characters",
            ("Field", "Rows", "Mean", "Median", "90 % up to", "99 % up to", "Longest"),
            [((Code(name), " (as JSON)" * (name in JSON_FIELDS)), *_cells_of(one)) for name, one in lengths.items()],
        )


def _cells_of(one: TextLength) -> tuple[int | float, ...]:
    return one["num_rows"], one["mean"], one["p50"], one["p90"], one["p99"], one["longest"]


def _class_blocks(classes: ClassCounts, label_map: Mapping[str, int]) -> Iterator[Block]:
    num_rows = sum(classes["num_rows"].values())
    listed = list(classes["num_rows"].items())[:_MAX_SHOWN_CLASSES]  # the largest first
    yield Heading("Classes")
    yield Paragraph(
        f"{count_of(classes['num_classes'], 'class')} in column {classes['column']!r}; always guessing the largest "
        f"would be right for {listed[0][1] / num_rows:.1%} of the training rows."
        if listed and num_rows
        else f"No class in column {classes['column']!r}."
    )
    if classes["similar"]:
        groups = [", ".join(map(repr, group)) for group in classes["similar"]]
        yield Paragraph(
            f"These names differ in upper and lower case only, and are different classes: {_some(groups, '; ')}."
        )
    if classes["only_held_out"]:
        missing = _some([*map(repr, classes["only_held_out"])], ", ")
        yield Paragraph(f"No training row has these classes, so no answer to their rows can be right: {missing}.")
    yield Table(
        "",
        ("Class", "Id", "Rows", "Share"),
        [
            (shorten(name, _MAX_NAME_CHARACTERS), label_map.get(name, "-"), count, write_share(count, num_rows))
            for name, count in listed
        ],
    )
    if classes["num_classes"] > len(listed):
        smaller = count_of(classes["num_classes"] - len(listed), "smaller one")
        yield Paragraph(f"and {smaller}; the smallest is {shorten(str(classes['smallest']), _MAX_NAME_CHARACTERS)}.")


def _some(names: Sequence[str], separator: str) -> str:
    """Write the first names of a list; not how many more there are, since it may be cut itself."""
    return separator.join(names[:_MAX_SHOWN_ROWS]) + " and more" * (len(names) > _MAX_SHOWN_ROWS)


def _mixed_labels(classes: CheckedClasses) -> Paragraph:
    counts = ", ".join(f"{kind}: {count_of(number, 'row')}" for kind, number in classes["types"].items())
    joined = ""
    if classes["joined"]:
        names = [repr(shorten(name, _MAX_NAME_CHARACTERS)) for name in classes["joined"]]
        joined = f" Classes with labels of several types: {name_first(names, _MAX_SHOWN_ROWS)}."
    differ = f"Note: labels in column {classes['column']!r} are of different types ({counts})."
    alike = (Code("1"), " and a text ", Code('"1"'), " are one class, as are ", Code("true"), " and ", Code('"true"'))
    return Paragraph((f"{differ} All are taken as text, so a number ", *alike, f".{joined}"))


def _finding_blocks(findings: FindingsByKind) -> Iterator[Block]:
    yield Table(
        "",
        ("Finding", "Rows", "Outcome", "What it means"),
        [(Code(kind), one["num_rows"], one["fate"], one["meaning"]) for kind, one in findings.items()],
        text_columns=(0, 2, 3),
    )
    for kind, one in findings.items():
        yield Heading((Code(kind), f": {count_of(one['num_rows'], 'row')} {_OUTCOMES[one['fate']]}"), level=4)
        # The first thousand are kept with their reason; of the others the JSON file has the numbers.
        rows = [
            Item(f"{shorten_path(row['file'])}, row {row['row']}: {shorten(row['reason'], _MAX_SHOWN_CHARACTERS)}")
            for row in one["rows"]
        ]
        yield Items(_first(rows, one["num_rows"], ", all by row number in the JSON file beside this one"))


def _first(items: Iterable[Item], total: int, elsewhere: str = "") -> list[Item]:
    """Return the first items of a list, and how many more there are."""
    shown = list(islice(items, _MAX_SHOWN_ROWS))
    more = total - len(shown)
    return [*shown, *([Item(f"and {more:,} more{elsewhere}")] if more > 0 else [])]


def count_rows_in_file(file: FileRows | UnbegunFile) -> int | None:
    """Count the rows that were read of a file as they stand there, before any were exploded.

    Args:
        file: what became of its rows.

    Returns:
        Their number; ``None`` where reading was not begun.
    """
    return file["exploded"]["rows_in_file"] if "exploded" in file else file["rows_read"]


def describe_row_limit(max_rows: int | None, rows_in_files: Iterable[int | None]) -> str | None:
    """Describe how many files were read no further than ``data.max_rows``.

    Args:
        max_rows: the limit in rows of a file; ``None`` for none.
        rows_in_files: of each file, see ``count_rows_in_file``.

    Returns:
        A sentence or two; ``None`` where no file reached the limit, so that everything was read.
    """
    counts = list(rows_in_files)
    num_reached = 0 if max_rows is None else sum(rows is not None and rows >= max_rows for rows in counts)
    if max_rows is None or not num_reached:
        return None
    # A file of exactly as many rows reaches the limit too: nobody has looked behind it.
    files = "The file" if len(counts) == 1 else f"{num_reached:,} of {len(counts):,} files"
    return (
        f"data.max_rows: {max_rows} ends the reading of a file after {count_of(max_rows, 'row')}. {files} reached it; "
        "rows after that are in no count."
    )
