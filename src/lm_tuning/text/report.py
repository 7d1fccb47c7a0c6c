"""Write the section of the data report that tells what tokenizing did to the rows."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np

from lm_tuning.data.check.findings import RowPositions
from lm_tuning.data.format.conventions import SEQ2SEQ_LM, SEQUENCE_CLASSIFICATION
from lm_tuning.data.split.class_shares import choose_shown
from lm_tuning.text.tokenizers.counts import CHANGED, DROPPED, NUM_DETAILS, SplitCounts
from lm_tuning.wording import code_span, count_of, escape_markdown

REPORT_NAME = "report.json"

_NUM_ROWS_SHOWN = 20
_MAX_CLASSES = 30
_MAX_DETAIL_CHARACTERS = 160


def build_tokens_section(
    summary: Mapping[str, Any], counts: Mapping[str, SplitCounts], positions: RowPositions
) -> dict[str, Any]:
    """Describe the tokens of all splits.

    Args:
        summary: as ``write_tokens`` stores it.
        counts: what happened to the rows, by split.
        positions: where rows stand in their files.

    Returns:
        ``facts``, ``metrics`` and ``markdown``. Every dropped or changed row is named in the facts.
    """
    dropped = _outcomes(counts, DROPPED, positions)
    changed = _outcomes(counts, CHANGED, positions)
    facts = {
        **{key: value for key, value in summary.items() if key != "label_map"},
        "dropped": dropped,
        "changed": changed,
    }
    splits = summary["splits"]
    metrics = {
        f"{split}_{name}": value
        for split, part in splits.items()
        for name in ("num_rows", "num_tokens", "num_supervised_tokens", "supervised_fraction", "majority_fraction")
        if (value := part.get(name)) is not None
    }
    metrics = {f"data_{name.replace('num_', '')}": value for name, value in metrics.items()}
    metrics["data_rows_dropped_by_tokenizing"] = sum(outcome["num_rows"] for outcome in dropped)
    # A row may be changed in more than one way.
    metrics["data_rows_changed_by_tokenizing"] = sum(
        len(set(chain.from_iterable(of_split.rows(reason) for reason in CHANGED))) for of_split in counts.values()
    )
    return {"facts": facts, "metrics": metrics, "markdown": _write_markdown(summary, dropped, changed)}


def _outcomes(
    counts: Mapping[str, SplitCounts], reasons: Mapping[str, str], positions: RowPositions
) -> list[dict[str, Any]]:
    """Return one entry a split and reason that has rows."""
    outcomes = []
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


def _write_markdown(summary: Mapping[str, Any], dropped: list[dict[str, Any]], changed: list[dict[str, Any]]) -> str:
    tokenizer = summary["tokenizer"]
    special = {name: tokenizer[f"{name.lower()}_token"] for name in ("BOS", "EOS", "PAD")}
    tokens = ", ".join(f"{name} {code_span(token)}" if token else f"no {name}" for name, token in special.items())
    lines = [
        "## Tokens",
        "",
        f"Rows of format `{summary['format']}` as {summary['rendering']}; {_describe_limits(summary)}. Special tokens: "
        f"{tokens}.",
        "",
        *_split_table(summary),
        *_class_table(summary),
    ]
    if summary["sources"]:
        lines += ["", "| source | weight | training rows before tokenizing |", "|---|--:|--:|"]
        lines += [
            f"| {_cell(source['path'])} | {source['weight']:g} | {source['num_rows']:,} |"
            for source in summary["sources"]
        ]
    for title, outcomes in (("Rows left out", dropped), ("Rows changed", changed)):
        lines += ["", f"### {title}", "", *(_describe_outcomes(outcomes) if outcomes else ["None."])]
    return "\n".join(lines) + "\n"


def _describe_limits(summary: Mapping[str, Any]) -> str:
    """Describe how long rows may be and what is supervised of them."""
    limit, truncation = f"at most {count_of(summary['max_length_tokens'], 'token')}", f"(`{summary['truncation']}`)"
    if summary["task"] == SEQUENCE_CLASSIFICATION:
        return f"{limit} per row {truncation}, each with one of {count_of(len(summary['label_map']), 'class')} to learn"
    if summary["task"] == SEQ2SEQ_LM:
        return f"{limit} per source and {summary['max_target_tokens']:,} per target {truncation}, loss on the target"
    return f"{limit} per row {truncation}, loss on `{summary['loss_on']}`"


def _split_table(summary: Mapping[str, Any]) -> list[str]:
    """Write what each split holds: rows and tokens, what is supervised, and how long rows are."""
    task = summary["task"]
    # Title and key of what is measured in tokens, and of what stands between that and the counts.
    measured = {"length": "length_tokens"}
    supervised = {"supervised": "supervised_fraction"}
    if task == SEQUENCE_CLASSIFICATION:
        supervised = {"classes": "num_classes", "largest class": "majority_fraction"}
    elif task == SEQ2SEQ_LM:
        supervised = {}
        measured = {"source": "source_tokens", "target": "target_tokens"}
    head = ["split", "rows read", "rows kept", "tokens", *supervised]
    for title in measured:
        head += [f"{title} p50", "p90", "p99", "longest"]
    lines = [f"| {' | '.join(head)} |", f"|---|{'--:|' * (len(head) - 1)}"]
    for split, part in summary["splits"].items():
        cells = [split, *(f"{part[name]:,}" for name in ("num_rows_read", "num_rows", "num_tokens"))]
        cells += [_number(part[name]) for name in supervised.values()]
        for name in measured.values():
            lengths = part[name] or dict.fromkeys(("p50", "p90", "p99", "max"), 0)
            cells += [f"{lengths[quantile]:,}" for quantile in ("p50", "p90", "p99", "max")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _class_table(summary: Mapping[str, Any]) -> list[str]:
    """Write how many rows of each class the splits hold: the largest of each split, those of train first."""
    if summary["task"] != SEQUENCE_CLASSIFICATION:
        return []
    rows = {split: part["rows_by_class"] for split, part in summary["splits"].items()}
    names = sorted(summary["label_map"], key=lambda name: (-rows["train"][name], name))
    counts = [np.array([of_split[name] for name in names], dtype=np.int64) for of_split in rows.values()]
    shown = [names[position] for position in choose_shown(counts, most=_MAX_CLASSES)]
    lines = ["", f"| class | id | {' | '.join(rows)} |", f"|---|{'--:|' * (len(rows) + 1)}"]
    for name in shown:
        cells = " | ".join(f"{of_split[name]:,}" for of_split in rows.values())
        lines.append(f"| {_cell(name)} | {summary['label_map'][name]} | {cells} |")
    if len(names) > _MAX_CLASSES:
        lines += ["", f"Classes that are not shown here, but in the JSON report: {len(names) - _MAX_CLASSES:,}."]
    return lines


def _number(value: float | None) -> str:
    """Write a count, or a share as percent; nothing for what cannot be said of no rows."""
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.1%}"


def _describe_outcomes(outcomes: list[dict[str, Any]]) -> list[str]:
    lines = []
    for outcome in outcomes:
        lines.append(f"- {outcome['num_rows']:,} in {outcome['split']}: {outcome['meaning']}.")
        for row in outcome["rows"][:_NUM_ROWS_SHOWN]:
            lines.append(
                f"  - {escape_markdown(row['file'])}, row {row['row']}"
                + (f": {_cell(row['reason'])}" if row["reason"] != outcome["meaning"] else "")
            )
        if outcome["num_rows"] > _NUM_ROWS_SHOWN:
            lines.append(f"  - and {outcome['num_rows'] - _NUM_ROWS_SHOWN:,} more")
    return lines


def _cell(text: str) -> str:
    """Write a text for a line of a list or table, shortened."""
    return escape_markdown(text if len(text) <= _MAX_DETAIL_CHARACTERS else f"{text[:_MAX_DETAIL_CHARACTERS]}…")
