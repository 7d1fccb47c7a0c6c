"""The section ``rows`` of the data report: what was read, as what, and what became of every row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from lm_tuning.data.check.findings import shorten
from lm_tuning.data.check.policy import ALWAYS_SKIPPED
from lm_tuning.data.format.examples import JSON_FIELDS
from lm_tuning.wording import count_of, escape_markdown, fence

_MAX_SHOWN_ROWS = 20
_MAX_SHOWN_CLASSES = 30
_MAX_SHOWN_FILES = 50
_MAX_SHOWN_CHARACTERS = 300
_OUTCOMES = {"skipped": "left out", "refused": "refused: nothing is trained on before they are fixed", "kept": "kept"}


def build_rows_section(summary: Mapping[str, Any], findings: Mapping[str, Any]) -> dict[str, Any]:
    """Write the section of a folder of checked rows.

    Args:
        summary: see ``write_checked_rows``.
        findings: see ``read_findings``.

    Returns:
        ``facts``, ``metrics`` and ``markdown``.
    """
    counts = summary["num_rows"]
    bad_fraction = counts["skipped"] / counts["read"] if counts["read"] else 0.0
    facts = {
        "num_rows": counts,
        "bad_fraction": bad_fraction,
        **{name: summary[name] for name in _COPIED},
        "text_lengths": summary.get("text_lengths"),
        "is_unread": summary.get("is_unread", False),
        "findings": findings,
    }
    metrics = {
        "data_rows_read": counts["read"],
        "data_rows_kept": counts["kept"],
        "data_rows_skipped": counts["skipped"],
        "data_bad_fraction": bad_fraction,
        **{f"data_finding_{kind}": found["num_rows"] for kind, found in findings.items()},
    }
    return {"facts": facts, "metrics": metrics, "markdown": "\n\n".join(_markdown(summary, findings))}


_COPIED = (
    "format",
    "reading",
    "columns",
    "appended",
    "template",
    "not_used",
    "on_bad_row",
    "max_bad_fraction",
    "files",
    "mixing",
    "refused",
    "label_map",
    "classes",
)


def _markdown(summary: Mapping[str, Any], findings: Mapping[str, Any]) -> Iterator[str]:
    counts = summary["num_rows"]
    is_unread = summary.get("is_unread", False)
    yield "## Rows"
    yield _told_counts(counts, summary)
    if summary["refused"]:
        listed = [f"- {escape_markdown(problem)}" for problem in summary["refused"][:_MAX_SHOWN_ROWS]]
        more = len(summary["refused"]) - _MAX_SHOWN_ROWS
        yield "**The run stopped here**, for this reason:"
        yield "\n".join([*listed, *([f"- and {more:,} more"] if more > 0 else [])])
    if not is_unread:
        yield f"Read as `{summary['format']}`: {escape_markdown(summary['reading'])}."
    if summary["template"]:
        yield f"The template:\n\n{fence(summary['template'])}"
    if summary["not_used"]:
        yield f"Columns that nothing reads: {escape_markdown(', '.join(map(repr, summary['not_used'])))}."
    yield "### Files"
    yield _files_table(summary["files"])
    yield from _exploded_lines(summary["files"])
    if len(summary["mixing"]) > 1 or any(source["weight"] != 1 for source in summary["mixing"]):
        yield "### Sources"
        yield _table(
            ("Source", "Weight", "Rows", "Rows per epoch, before any are held out"),
            [
                (escape_markdown(str(one["path"])), f"{one['weight']:g}", one["num_rows"], one["rows_per_epoch"])
                for one in summary["mixing"]
            ],
        )
    yield from _length_parts(summary.get("text_lengths"))
    if summary["classes"]:
        yield "### Classes"
        yield from _class_parts(summary["classes"], summary["label_map"] or {})
    yield "### Findings"
    has_mixed_labels = len((summary["classes"] or {}).get("types", ())) > 1
    if has_mixed_labels:
        yield _mixed_labels(summary["classes"])
    if not findings and has_mixed_labels:
        return
    if not findings:
        yield "None: nothing is unusual about any row." if not is_unread else "None in the rows that were read."
        return
    yield _table(
        ("Finding", "Rows", "Outcome", "What it means"),
        [(f"`{kind}`", one["num_rows"], one["fate"], one["meaning"]) for kind, one in findings.items()],
    )
    for kind, one in findings.items():
        yield f"#### `{kind}`: {count_of(one['num_rows'], 'row')} {_OUTCOMES[one['fate']]}"
        yield "\n".join(_row_lines(one))


def _told_counts(counts: Mapping[str, int], summary: Mapping[str, Any]) -> str:
    if summary.get("is_unread", False):
        return (
            "**The rows could not be read to the end.** Nothing below is about a whole set of rows, and nothing is "
            f"trained on. Rows read before: **{counts['read']:,}**; bad ones among them: **{counts['skipped']:,}**."
        )
    return (
        f"Rows read from {count_of(len(summary['files']), 'file')}: **{counts['read']:,}**. Good ones: "
        f"**{counts['kept']:,}**. {_told_bad(counts, summary)}"
    )


def _length_parts(lengths: Mapping[str, Mapping[str, int | float]] | None) -> Iterator[str]:
    if not lengths:
        return
    figures = ("num_rows", "mean", "p50", "p90", "p99", "longest")
    rows = [
        (f"`{name}`{' (as JSON)' * (name in JSON_FIELDS)}", *(one[figure] for figure in figures))
        for name, one in lengths.items()
    ]
    yield "### Lengths of texts, in characters"
    yield _table(("Field", "Rows", "Mean", "Median", "90 % up to", "99 % up to", "Longest"), rows)


def _told_bad(counts: Mapping[str, int], summary: Mapping[str, Any]) -> str:
    if not counts["skipped"]:
        return "None is bad."
    share = f"{counts['skipped'] / counts['read']:.2%}"
    if summary["on_bad_row"] == "error":
        return f"Bad ones: **{counts['skipped']:,}** ({share}); `data.on_bad_row: error` lets none pass."
    limit = f"`data.max_bad_fraction` lets {summary['max_bad_fraction']:.2%} pass"
    if summary["max_bad_fraction"]:
        limit += f", and up to {ALWAYS_SKIPPED} rows of a file whatever their share"
    return f"Bad ones, left out: **{counts['skipped']:,}** ({share}); {limit}."


def _files_table(files: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            escape_markdown(_shown_path(file["path"])),
            file["split"],
            *_counts_of_file(file),
        )
        for file in files[:_MAX_SHOWN_FILES]
    ]
    table = _table(("File", "Split", "Rows read", "Good", "Bad", "First row id"), rows)
    more = len(files) - _MAX_SHOWN_FILES
    return f"{table}\n\nand {count_of(more, 'more file')}." if more > 0 else table


def _counts_of_file(file: Mapping[str, Any]) -> tuple[int | str, ...]:
    """Return the last four cells of a file's line; dashes where reading was not begun."""
    if file["rows_read"] is None:
        return ("-",) * 4
    return file["rows_read"], file["rows_kept"], sum(file["rows_skipped"].values()), file["first_row_id"]


def _exploded_lines(files: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Describe what became of the lists that were exploded."""
    for file in [file for file in files if file.get("exploded")][:_MAX_SHOWN_FILES]:
        told = file["exploded"]
        lists = ", ".join(f"`{escape_markdown(name)}`" for name in told["lists"])
        before, after = count_of(told["rows_in_file"], "row"), count_of(file["rows_read"], "row")
        text = (
            f"{escape_markdown(_shown_path(file['path']))}: {before} of the file became {after} by `data.explode` "
            f"({lists}). Row numbers here count the rows after it."
        )
        if told["rows_with_empty_lists"]:
            named = ", ".join(f"{number:,}" for number in told["first_rows_with_empty_lists"])
            more = told["rows_with_empty_lists"] - len(told["first_rows_with_empty_lists"])
            text += (
                f" An empty list, which gives no row, is in {count_of(told['rows_with_empty_lists'], 'row')} of the "
                f"file: {named}{f' and {more:,} more' if more else ''}."
            )
        yield text


def _class_parts(classes: Mapping[str, Any], label_map: Mapping[str, int]) -> Iterator[str]:
    num_rows = sum(classes["num_rows"].values())
    listed = list(classes["num_rows"].items())[:_MAX_SHOWN_CLASSES]
    yield (
        f"{count_of(classes['num_classes'], 'class')} in column {escape_markdown(repr(classes['column']))}; always "
        f"guessing the largest would be right for {listed[0][1] / num_rows:.1%} of the training rows."
        if listed and num_rows
        else f"No class in column {escape_markdown(repr(classes['column']))}."
    )
    if classes["similar"]:
        pairs = "; ".join(", ".join(map(repr, group)) for group in classes["similar"][:_MAX_SHOWN_ROWS])
        yield f"These names differ in upper and lower case only, and are different classes: {escape_markdown(pairs)}."
    if classes["only_held_out"]:
        missing = escape_markdown(", ".join(map(repr, classes["only_held_out"][:_MAX_SHOWN_ROWS])))
        yield f"No training row has these classes, so no answer to their rows can be right: {missing}."
    rows = [
        (escape_markdown(shorten(name, 60)), label_map.get(name, "-"), count, f"{count / num_rows:.2%}")
        for name, count in listed
    ]
    yield _table(("Class", "Id", "Rows", "Share"), rows)
    if classes["num_classes"] > len(listed):
        smallest = escape_markdown(shorten(classes["smallest"], 60))
        smaller = count_of(classes["num_classes"] - len(listed), "smaller one")
        yield f"and {smaller}; the smallest is {smallest}."


def _mixed_labels(classes: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{kind}: {count_of(number, 'row')}" for kind, number in classes["types"].items())
    text = (
        f"Note: labels in column {escape_markdown(repr(classes['column']))} are of different types ({counts}). All are "
        'taken as text, so a number `1` and a text `"1"` are one class, as are `true` and `"true"`.'
    )
    if classes["joined"]:
        joined = ", ".join(repr(shorten(name, 60)) for name in classes["joined"][:_MAX_SHOWN_ROWS])
        more = len(classes["joined"]) - _MAX_SHOWN_ROWS
        text += f" Classes with labels of several types: {escape_markdown(joined)}{f' and {more:,} more' * (more > 0)}."
    return text


def _row_lines(finding: Mapping[str, Any]) -> Iterator[str]:
    for row in finding["rows"][:_MAX_SHOWN_ROWS]:
        reason = escape_markdown(shorten(row["reason"], _MAX_SHOWN_CHARACTERS))
        yield f"- {escape_markdown(_shown_path(row['file']))}, row {row['row']:,}: {reason}"
    more = finding["num_rows"] - min(len(finding["rows"]), _MAX_SHOWN_ROWS)
    if more > 0:
        yield f"- and {more:,} more, all by row number in the JSON file beside this one"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Write a table; numbers get thousands separators and stand on the right."""
    is_number = [isinstance(value, int | float) or str(value).endswith("%") for value in (rows[0] if rows else head)]
    lines = [
        f"| {' | '.join(head)} |",
        f"| {' | '.join('---:' if right else '---' for right in is_number)} |",
    ]
    for row in rows:
        cells = [f"{value:,}" if isinstance(value, int | float) else str(value) for value in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown_path(path: str) -> str:
    """Shorten a path to its last three parts."""
    parts = PurePath(path).parts
    return path if len(parts) <= 4 else "/".join(("…", *parts[-3:]))
