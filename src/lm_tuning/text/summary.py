"""Say what tokenizing did to the rows: how long they are, what share is learned, what was cut or left out and why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_tuning.text.counts import CHANGED, DROPPED, SplitCounts
from lm_tuning.text.token_table import SPLITS, Int32Array, Span, TokenRow, TokenTable, open_split

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUANTILES = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
LENGTHS_NAME = "lengths.png"
LEARNED_MARKS = ("⟦", "⟧")

_NUM_PREVIEW_ROWS = 5


def summarize_split(table: TokenTable, counts: SplitCounts) -> dict[str, Any]:
    """Sum up one split.

    Args:
        table: its tokens.
        counts: what happened to its rows.

    Returns:
        Row and token counts, the share of learned tokens, quantiles of the length in tokens, rows changed and dropped
        by reason, and how many rows were too long and by how much.
    """
    num_tokens = int(table.lengths.sum(dtype=np.int64))
    num_supervised = int(table.num_supervised.sum(dtype=np.int64))
    return {
        "num_rows_read": counts.num_read,
        "num_rows": len(table),
        "num_tokens": num_tokens,
        "num_supervised_tokens": num_supervised,
        "supervised_fraction": num_supervised / num_tokens if num_tokens else None,
        "length_tokens": length_quantiles(table.lengths),
        "changed": {reason: counts.counts[reason] for reason in CHANGED if counts.counts[reason]},
        "dropped": {reason: counts.counts[reason] for reason in DROPPED if counts.counts[reason]},
        "too_long": counts.describe_long(),
    }


def length_quantiles(lengths: Int32Array) -> dict[str, float] | None:
    """Return quantiles and mean of lengths in tokens.

    Args:
        lengths: ``(rows,)``.

    Returns:
        By name; every quantile is a length that occurs. ``None`` without rows.
    """
    if not len(lengths):
        return None
    values = np.quantile(lengths, list(QUANTILES.values()), method="higher")
    return {**{name: int(value) for name, value in zip(QUANTILES, values, strict=True)}, "mean": float(lengths.mean())}


def describe_tokens(summary: Mapping[str, Any]) -> str:
    """Say in a line what a summary holds, for the log.

    Args:
        summary: as ``write_tokens`` returns it.
    """
    splits = summary["splits"]
    rows = ", ".join(f"{facts['num_rows']:,} {name}" for name, facts in splits.items())
    train = splits["train"]
    lengths = train["length_tokens"]
    line = f"{rows} rows; train {train['num_tokens']:,} tokens, {train['supervised_fraction']:.0%} of them learned"
    line += f", {lengths['p50']} a row at the median, {lengths['max']} at most"
    dropped = sum(sum(facts["dropped"].values()) for facts in splits.values())
    return f"{line}; {dropped:,} rows dropped" if dropped else line


def mark_learned(tokenizer: Any, row: TokenRow) -> str:
    """Decode a row with the learned parts between ``⟦`` and ``⟧``.

    Args:
        tokenizer: the tokenizer that made it.
        row: a row of a token table.
    """
    opening, closing = LEARNED_MARKS
    parts: list[str] = []
    edges: list[Span] = [*row.spans, (len(row.input_ids), len(row.input_ids))]
    at = 0
    for start, end in edges:
        parts.append(tokenizer.decode(row.input_ids[at:start]))
        if end > start:
            parts.append(f"{opening}{tokenizer.decode(row.input_ids[start:end])}{closing}")
        at = end
    return "".join(parts)


def preview_tokens(folder: Path, tokenizer: Any) -> dict[str, Any]:
    """Return the first rows of each split as a table.

    Args:
        folder: tokenized splits.
        tokenizer: the tokenizer that made them.

    Returns:
        ``columns`` and ``data``.
    """
    data = []
    for split in SPLITS:
        table = open_split(folder, split)
        for row in (table[i] for i in range(min(_NUM_PREVIEW_ROWS, len(table)))):
            data.append([split, row.row_id, len(row.input_ids), row.num_supervised, mark_learned(tokenizer, row)])
    return {"columns": ["split", "row_id", "length", "num_supervised", "text"], "data": data}


def write_lengths(folder: Path, *, max_length_tokens: int) -> None:
    """Keep a picture of the lengths with the tokens, so that a run that reuses them draws nothing.

    Args:
        folder: tokenized splits.
        max_length_tokens: see ``draw_lengths``.
    """
    draw_lengths(folder, max_length_tokens=max_length_tokens).savefig(folder / LENGTHS_NAME, dpi=120)


def read_lengths(folder: Path) -> bytes:
    """Return the picture of the lengths as PNG.

    Args:
        folder: what the tokenize pipeline stored.
    """
    return (Path(folder) / LENGTHS_NAME).read_bytes()


def draw_lengths(folder: Path, *, max_length_tokens: int) -> Figure:
    """Draw how long the training rows are, and how much of them is learned.

    Args:
        folder: tokenized splits.
        max_length_tokens: the limit, drawn as a line where rows come near it.
    """
    from matplotlib.figure import Figure

    table = open_split(folder, "train")
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    longest = int(table.lengths.max(initial=1))
    bins = np.linspace(0, longest + 1, min(60, longest + 1) + 1).tolist()
    axes.hist(table.lengths, bins=bins, label="whole row", alpha=0.6)
    axes.hist(table.num_supervised, bins=bins, label="learned part", alpha=0.6)
    if longest > max_length_tokens // 2:
        axes.axvline(max_length_tokens, color="black", linestyle="--", linewidth=1, label="max_length_tokens")
    axes.set_xlabel("tokens")
    axes.set_ylabel("training rows")
    axes.legend()
    return figure
