"""Sum up what tokenizing did to the rows: lengths, the share that is supervised, what was cut or left out and why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_tuning.data.format.columns import CAUSAL_LM, SEQ2SEQ_LM, SEQUENCE_CLASSIFICATION
from lm_tuning.text.records import LengthQuantiles, SplitTokens, TokenSummary
from lm_tuning.text.store.table import Int32Array, TokenTable, open_split
from lm_tuning.text.tokenizers.counts import CHANGED, DROPPED, SplitCounts
from lm_tuning.text.tokenizers.limit_losses import measure_losses
from lm_tuning.wording import count_of, noun_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_QUANTILES = (0.0, 0.5, 0.9, 0.95, 0.99, 1.0)
LENGTHS_NAME = "lengths.png"


def summarize_split(
    table: TokenTable, counts: SplitCounts, *, task: str = CAUSAL_LM, label_map: Mapping[str, int] | None = None
) -> SplitTokens:
    """Sum up one split.

    Args:
        table: its tokens.
        counts: what happened to its rows.
        task: the ``task`` parameter.
        label_map: id by name of the classes, for ``sequence_classification``.

    Returns:
        Row and token counts, quantiles of the length in tokens, rows changed and dropped by reason, how many rows were
        too long and by how much, and ``lost_to_limits``, see ``measure_losses``. For rows with classes the rows of each
        class (``rows_by_class``) and the share of the largest (``majority_fraction``); for others the supervised tokens
        and their share. For rows of source and target the quantiles of both, and the same about targets that were too
        long.
    """
    num_tokens = int(table.lengths.sum(dtype=np.int64))
    facts: SplitTokens = {
        "num_rows_read": counts.num_read,
        "num_rows": len(table),
        "num_tokens": num_tokens,
        "length_tokens": length_quantiles(table.lengths),
        "changed": {reason: counts.counts[reason] for reason in CHANGED if counts.counts[reason]},
        "dropped": {reason: counts.counts[reason] for reason in DROPPED if counts.counts[reason]},
        "too_long": counts.long_rows.describe(),
        "lost_to_limits": measure_losses(table, counts, task=task),
    }
    if task == SEQUENCE_CLASSIFICATION:
        rows = np.bincount(table.labels, minlength=len(label_map or {}))  # (classes,)
        facts["num_classes"] = int((rows > 0).sum())
        facts["rows_by_class"] = {name: int(rows[label]) for name, label in (label_map or {}).items()}
        facts["majority_fraction"] = int(rows.max()) / len(table) if len(table) else None
        return facts
    facts["num_supervised_tokens"] = int(table.num_supervised.sum(dtype=np.int64))
    facts["supervised_fraction"] = facts["num_supervised_tokens"] / num_tokens if num_tokens else None
    if task == SEQ2SEQ_LM:
        facts["source_tokens"] = length_quantiles(table.lengths - table.num_supervised)
        facts["target_tokens"] = length_quantiles(table.num_supervised)
        facts["targets_too_long"] = counts.long_targets.describe()
    return facts


def length_quantiles(lengths: Int32Array) -> LengthQuantiles | None:
    """Return quantiles and mean of lengths in tokens.

    Args:
        lengths: ``(rows,)``.

    Returns:
        By name; every quantile is a length that occurs. ``None`` without rows.
    """
    if not len(lengths):
        return None
    values = map(int, np.quantile(lengths, _QUANTILES, method="higher"))
    low, p50, p90, p95, p99, high = values
    return {
        "min": low,
        "p50": p50,
        "p90": p90,
        "p95": p95,
        "p99": p99,
        "max": high,
        "mean": float(lengths.mean()),
    }


def describe_tokens(summary: TokenSummary) -> str:
    """Describe in a line what a summary holds, for the log.

    Args:
        summary: as ``write_tokens`` returns it.
    """
    splits = summary["splits"]
    rows = ", ".join(f"{facts['num_rows']:,} {name}" for name, facts in splits.items())
    train = splits["train"]
    noun = noun_for(list(splits.values())[-1]["num_rows"], "row")
    line = f"{rows} {noun}; train {count_of(train['num_tokens'], 'token')}"
    per_row = _describe_lengths(train["length_tokens"], unit=" per row")
    if summary["task"] == SEQUENCE_CLASSIFICATION:
        largest = f"the largest has {train['majority_fraction']:.1%} of the training rows"
        line += f", {per_row}; {count_of(train['num_classes'], 'class')}, {largest}"
    elif summary["task"] == SEQ2SEQ_LM:
        line += f"; sources of {_describe_lengths(train['source_tokens'])}"
        line += f"; targets of {_describe_lengths(train['target_tokens'])}"
    else:
        line += f", {train['supervised_fraction']:.0%} of them supervised, {per_row}"
    dropped = sum(sum(facts["dropped"].values()) for facts in splits.values())
    return f"{line}; {count_of(dropped, 'row')} dropped" if dropped else line


def _describe_lengths(lengths: LengthQuantiles | None, *, unit: str = "") -> str:
    assert lengths is not None, "tokens without a training row are refused"
    return f"{lengths['p50']}{unit} at the median, {lengths['max']} at most"


def write_lengths(folder: Path, **limits: Any) -> None:
    """Keep a picture of the lengths with the tokens, so that a run that reuses them draws nothing.

    Args:
        folder: tokenized splits.
        limits: see ``draw_lengths``.
    """
    draw_lengths(folder, **limits).savefig(folder / LENGTHS_NAME, dpi=120)


def read_lengths(folder: Path) -> bytes:
    """Return the picture of the lengths as PNG.

    Args:
        folder: what the tokenize pipeline stored.
    """
    return (Path(folder) / LENGTHS_NAME).read_bytes()


def draw_lengths(
    folder: Path, *, max_length_tokens: int, max_target_tokens: int | None = None, task: str = CAUSAL_LM
) -> Figure:
    """Draw how long the training rows are, and how much of them is supervised.

    Args:
        folder: tokenized splits.
        max_length_tokens: the limit, drawn as a line where rows come near it.
        max_target_tokens: the limit of targets, likewise, for ``seq2seq_lm``.
        task: the ``task`` parameter: it says which parts rows have.
    """
    from matplotlib.figure import Figure

    table = open_split(folder, "train")
    parts = {"whole row": table.lengths, "supervised part": table.num_supervised}
    limits = {"max_length_tokens": max_length_tokens}
    if task == SEQUENCE_CLASSIFICATION:
        parts = {"whole row": table.lengths}
    elif task == SEQ2SEQ_LM:
        parts = {"source": table.lengths - table.num_supervised, "target": table.num_supervised}
        limits |= {"max_target_tokens": max_target_tokens} if max_target_tokens else {}
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    longest = max(int(lengths.max(initial=1)) for lengths in parts.values())
    bins = np.linspace(0, longest + 1, min(60, longest + 1) + 1).tolist()
    for name, lengths in parts.items():
        axes.hist(lengths, bins=bins, label=name, alpha=0.6)
    for (name, limit), style in zip(limits.items(), ("--", ":"), strict=False):
        if longest > limit // 2:
            axes.axvline(limit, color="black", linestyle=style, linewidth=1, label=name)
    axes.set_xlabel("tokens")
    axes.set_ylabel("training rows")
    axes.legend(loc="upper right")
    return figure
