"""Write the section of the data report that tells what tokenizing did to the rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import cast

import numpy as np

from lm_tuning.data.check.findings import RowPositions
from lm_tuning.data.format.columns import SEQ2SEQ_LM, SEQUENCE_CLASSIFICATION
from lm_tuning.data.split.class_shares import choose_shown
from lm_tuning.reporting.document import (
    Block,
    Cell,
    Code,
    Heading,
    Item,
    Items,
    Paragraph,
    ReportSection,
    Section,
    Table,
    Words,
)
from lm_tuning.reporting.markdown import write_section
from lm_tuning.text.records import RowsOutcome, SplitTokens, TokensFacts, TokenSummary
from lm_tuning.text.tokenizers.counts import CHANGED, DROPPED, NUM_DETAILS, SplitCounts
from lm_tuning.wording import count_of, shorten

REPORT_NAME = "report.json"

_NUM_ROWS_SHOWN = 20
_MAX_CLASSES = 30
_MAX_DETAIL_CHARACTERS = 160


def build_tokens_section(
    summary: TokenSummary, counts: Mapping[str, SplitCounts], positions: RowPositions
) -> ReportSection[TokensFacts]:
    """Describe the tokens of all splits.

    Args:
        summary: as ``write_tokens`` stores it.
        counts: what happened to the rows, by split.
        positions: where rows stand in their files.

    Returns:
        The section; every dropped or changed row is named in its facts.
    """
    dropped = _outcomes(counts, DROPPED, positions)
    changed = _outcomes(counts, CHANGED, positions)
    # The names of all classes are in the summary; here they would hide what the section is about.
    told = {key: value for key, value in summary.items() if key != "label_map"}
    facts = cast("TokensFacts", {**told, "dropped": dropped, "changed": changed})
    metrics = {
        f"data_{split}_{name}": value
        for split, part in summary["splits"].items()
        for name, value in _numbers_of(part).items()
        if value is not None
    }
    metrics["data_rows_dropped_by_tokenizing"] = sum(outcome["num_rows"] for outcome in dropped)
    # A row may be changed in more than one way.
    metrics["data_rows_changed_by_tokenizing"] = sum(
        len(set(chain.from_iterable(of_split.rows(reason) for reason in CHANGED))) for of_split in counts.values()
    )
    section = Section("tokens", "Tokens", list(_blocks(summary, dropped, changed)))
    return {"facts": facts, "metrics": metrics, "markdown": write_section(section) + "\n"}


def _numbers_of(part: SplitTokens) -> dict[str, float | None]:
    return {
        "rows": part["num_rows"],
        "tokens": part["num_tokens"],
        "supervised_tokens": part.get("num_supervised_tokens"),
        "supervised_fraction": part.get("supervised_fraction"),
        "majority_fraction": part.get("majority_fraction"),
    }


def _outcomes(
    counts: Mapping[str, SplitCounts], reasons: Mapping[str, str], positions: RowPositions
) -> list[RowsOutcome]:
    """Return one entry per split and reason that has rows."""
    outcomes: list[RowsOutcome] = []
    for split, of_split in counts.items():
        for reason, meaning in reasons.items():
            rows = of_split.rows(reason)
            if not rows:
                continue
            named = [(*positions.find(row_id), of_split.detail(reason, row_id)) for row_id in rows[:NUM_DETAILS]]
            outcomes.append(
                {
                    "split": split,
                    "kind": reason,
                    "meaning": meaning,
                    "num_rows": len(rows),
                    "rows": [{"file": file, "row": row, "reason": detail or meaning} for file, row, detail in named],
                    "row_numbers": dict(positions.by_file(rows)),
                }
            )
    return outcomes


def _blocks(summary: TokenSummary, dropped: list[RowsOutcome], changed: list[RowsOutcome]) -> Iterator[Block]:
    tokenizer = summary["tokenizer"]
    tokens = {"BOS": tokenizer["bos_token"], "EOS": tokenizer["eos_token"], "PAD": tokenizer["pad_token"]}
    special: list[Words] = []
    for name, token in tokens.items():
        special += [", " * bool(special), *([f"{name} ", Code(token)] if token else [f"no {name}"])]
    how = ("Rows of format ", Code(summary["format"]), f" as {summary['rendering']}; ", *_describe_limits(summary))
    yield Paragraph((*how, ". Special tokens: ", *special, "."))
    yield _split_table(summary)
    if summary["task"] == SEQUENCE_CLASSIFICATION:
        yield from _class_blocks(summary, summary["label_map"] or {})
    if summary["sources"]:
        yield Table(
            "",
            ("source", "weight", "training rows before tokenizing"),
            [
                (shorten(source["path"], _MAX_DETAIL_CHARACTERS), f"{source['weight']:g}", source["num_rows"])
                for source in summary["sources"]
            ],
        )
    for title, outcomes in (("Rows left out", dropped), ("Rows changed", changed)):
        yield Heading(title)
        yield Items([_describe_outcome(outcome) for outcome in outcomes]) if outcomes else Paragraph("None.")


def _describe_limits(summary: TokenSummary) -> tuple[Words, ...]:
    """Describe how long rows may be and what is supervised of them."""
    limit = f"at most {count_of(summary['max_length_tokens'], 'token')}"
    cut = (" (", Code(summary["truncation"]), ")")
    if summary["task"] == SEQUENCE_CLASSIFICATION:
        classes = count_of(len(summary["label_map"] or ()), "class")
        return f"{limit} per row", *cut, f", each with one of {classes} to learn"
    if summary["task"] == SEQ2SEQ_LM:
        return f"{limit} per source and {summary['max_target_tokens']:,} per target", *cut, ", loss on the target"
    return f"{limit} per row", *cut, ", loss on ", Code(summary["loss_on"])


def _split_table(summary: TokenSummary) -> Table:
    """Write what each split holds: rows and tokens, what is supervised, and how long rows are."""
    columns, measured = ["supervised"], ["length"]
    if summary["task"] == SEQUENCE_CLASSIFICATION:
        columns = ["classes", "largest class"]
    elif summary["task"] == SEQ2SEQ_LM:
        columns, measured = [], ["source", "target"]
    head = ["split", "rows read", "rows kept", "tokens", *columns]
    for title in measured:
        head += [f"{title} p50", "p90", "p99", "longest"]
    rows: list[list[Cell]] = []
    for split, part in summary["splits"].items():
        cells: list[Cell] = [split, part["num_rows_read"], part["num_rows"], part["num_tokens"]]
        lengths = [part["length_tokens"]]
        if summary["task"] == SEQUENCE_CLASSIFICATION:
            cells += [part["num_classes"], _share(part["majority_fraction"])]
        elif summary["task"] == SEQ2SEQ_LM:
            lengths = [part["source_tokens"], part["target_tokens"]]
        else:
            cells.append(_share(part["supervised_fraction"]))
        for one in lengths:
            cells += [one["p50"], one["p90"], one["p99"], one["max"]] if one else [0, 0, 0, 0]
        rows.append(cells)
    return Table("", head, rows)


def _class_blocks(summary: TokenSummary, label_map: dict[str, int]) -> Iterator[Block]:
    """Write how many rows of each class the splits hold: the largest of each split, those of train first."""
    rows = {split: part["rows_by_class"] for split, part in summary["splits"].items()}
    # By name where rows are equal, so that the same tokens give the same report.
    names = sorted(label_map, key=lambda name: (-rows["train"][name], name))
    # (classes,) for each split
    counts = [np.array([of_split[name] for name in names], dtype=np.int64) for of_split in rows.values()]
    shown = [names[position] for position in choose_shown(counts, most=_MAX_CLASSES)]
    yield Table(
        "",
        ("class", "id", *rows),
        [
            (shorten(name, _MAX_DETAIL_CHARACTERS), label_map[name], *(of_split[name] for of_split in rows.values()))
            for name in shown
        ],
    )
    if len(names) > _MAX_CLASSES:
        hidden = len(names) - _MAX_CLASSES
        yield Paragraph(f"Classes that are not shown here, but in the JSON report: {hidden:,}.")


def _share(fraction: float | None) -> str:
    """Return a share as percent; nothing for what cannot be said of no rows."""
    return "" if fraction is None else f"{fraction:.1%}"


def _describe_outcome(outcome: RowsOutcome) -> Item:
    rows = [
        f"{row['file']}, row {row['row']}"
        # The reason is the meaning itself unless there is more to say of this row.
        + (f": {shorten(row['reason'], _MAX_DETAIL_CHARACTERS)}" if row["reason"] != outcome["meaning"] else "")
        for row in outcome["rows"][:_NUM_ROWS_SHOWN]
    ]
    more = outcome["num_rows"] - _NUM_ROWS_SHOWN
    return Item(
        f"{outcome['num_rows']:,} in {outcome['split']}: {outcome['meaning']}.",
        [*rows, *([f"and {more:,} more"] if more > 0 else [])],
    )
