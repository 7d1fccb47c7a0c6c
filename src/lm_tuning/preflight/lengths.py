"""Measure how long the rows are, what the limit cuts, and what other limits would cut."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from lm_tuning.data.format.columns import CAUSAL_LM, SEQ2SEQ_LM, SEQUENCE_CLASSIFICATION
from lm_tuning.preflight.records import LengthFigures, LimitChoice
from lm_tuning.text.records import BeyondLimit, SplitTokens
from lm_tuning.text.store.summary import length_quantiles
from lm_tuning.text.store.table import Int32Array

NUM_BINS = 60
SHORTENED = {
    CAUSAL_LM: ("old_turns_dropped", "prompt_shortened", "prompt_emptied", "answer_shortened", "end_cut"),
    SEQUENCE_CLASSIFICATION: ("text_shortened", "prompt_emptied", "end_cut"),
    SEQ2SEQ_LM: ("source_cut", "prompt_emptied", "target_cut"),
}
"""What tokenizing counts when a row is made to fit, by task; a row may count under several of them."""

# What is not supervised of a row and what is; and which of these a histogram shows.
_PARTS = {CAUSAL_LM: ("prompt", "answer"), SEQUENCE_CLASSIFICATION: (), SEQ2SEQ_LM: ("source", "target")}
_DRAWN = {CAUSAL_LM: ("row", "answer"), SEQUENCE_CLASSIFICATION: ("row",), SEQ2SEQ_LM: ("source", "target")}
_ROUND_LIMITS = tuple(2**power for power in range(5, 18))
_QUANTILE_LIMITS = {"p95": 0.95, "p99": 0.99, "p99.9": 0.999, "longest": 1.0}


def measure_lengths(
    lengths: Int32Array,
    num_supervised: Int32Array,
    *,
    max_length_tokens: int,
    summary: SplitTokens,
    task: str = CAUSAL_LM,
    max_target_tokens: int | None = None,
) -> LengthFigures:
    """Describe the lengths of the training rows.

    Args:
        lengths: tokens of each row, ``(rows,)``.
        num_supervised: supervised tokens of each row, ``(rows,)``; without meaning for rows with classes.
        max_length_tokens: the limit that the rows, or their sources, were cut to.
        summary: what tokenizing says about this split: ``changed``, ``dropped`` and, where rows were too long,
            ``too_long``.
        task: the ``task`` parameter.
        max_target_tokens: the limit that targets were cut to, for ``seq2seq_lm``.

    Returns:
        Quantiles in tokens of the whole row and of its parts, a histogram of the same, rows at the limit, and
        ``limits``, see ``compare_limits``. The parts are ``prompt`` (what is not supervised) and ``answer`` (what is),
        or ``source`` and ``target``; then the share of supervised tokens is there too. Rows with classes have no parts.
        For targets ``target_limits`` tells the same as ``limits``.
    """
    parts = zip(_PARTS[task], (lengths - num_supervised, num_supervised), strict=False)
    measured: dict[str, Int32Array] = {"row": lengths, **dict(parts)}
    # An encoder-decoder has a limit for each side; that of the source is the one that all tasks have.
    limited = measured.get("source", lengths)
    num_tokens = int(lengths.sum(dtype=np.int64))
    # 64 bits: three million rows of a thousand tokens are more than 32 hold.
    supervised_tokens = int(num_supervised.sum(dtype=np.int64)) if _PARTS[task] else None
    at_limit = int((limited >= max_length_tokens).sum())
    facts: LengthFigures = {
        "num_rows": len(lengths),
        "num_tokens": num_tokens,
        "num_supervised_tokens": supervised_tokens,
        "supervised_fraction": None if supervised_tokens is None else supervised_tokens / max(num_tokens, 1),
        "num_rows_without_learned": int((num_supervised == 0).sum()),
        "max_length_tokens": max_length_tokens,
        "num_rows_at_limit": at_limit,
        "at_limit_fraction": at_limit / max(len(lengths), 1),
        "num_rows_cut": {name: summary["changed"].get(name, 0) for name in SHORTENED[task]},
        "quantiles": {
            name: quantiles for name, values in measured.items() if (quantiles := length_quantiles(values)) is not None
        },
        "histogram": draw_histogram({name: measured[name] for name in _DRAWN[task]}),
        "limits": compare_limits(
            limited,
            present=max_length_tokens,
            beyond=summary["too_long"],
            # Dropped rows have no length any more, but were beyond the limit, so they count as over it.
            num_dropped=sum(summary["dropped"].get(name, 0) for name in ("too_long", "no_answer_left")),
        ),
    }
    if max_target_tokens is not None:
        facts["max_target_tokens"] = max_target_tokens
        facts["num_targets_at_limit"] = int((num_supervised >= max_target_tokens).sum())
        facts["target_limits"] = compare_limits(
            num_supervised,
            present=max_target_tokens,
            beyond=summary["targets_too_long"],
            num_dropped=summary["dropped"].get("target_too_long", 0),
        )
    return facts


def draw_histogram(parts: Mapping[str, Int32Array]) -> dict[str, list[int]]:
    """Count rows by length, in bins of equal width.

    Args:
        parts: tokens of each row, or of a part of it, by name, ``(rows,)``.

    Returns:
        ``edges`` ``(bins + 1,)`` in tokens, the last one beyond the longest, and by name of the part the rows in each
        bin.
    """
    longest = max(int(lengths.max(initial=0)) for lengths in parts.values())
    # Whole tokens to a bin, and one axis for all parts, so that their panels can be compared.
    width = math.ceil((longest + 1) / NUM_BINS)
    num_bins = math.ceil((longest + 1) / width)
    return {
        "edges": [index * width for index in range(num_bins + 1)],
        **{name: np.bincount(lengths // width, minlength=num_bins).tolist() for name, lengths in parts.items()},
    }


def compare_limits(lengths: Int32Array, *, present: int, beyond: BeyondLimit, num_dropped: int) -> list[LimitChoice]:
    """Describe what each choice of a limit, such as ``tokenize.max_length_tokens``, would cut.

    Args:
        lengths: tokens of each row, or of the part that is limited, as they are now, ``(rows,)``.
        present: the limit that they were cut to.
        beyond: what is known of rows beyond the present limit: ``num_rows``, ``max_length_tokens``,
            ``tokens_over_limit`` (what is cut now) and, by powers of two above the limit as text, ``rows_over`` and
            ``tokens_over``; the powers that are missing cut nothing.
        num_dropped: rows beyond the limit that were dropped.

    Returns:
        For each limit, ascending: ``limit``, why it is ``named``, ``rows_over`` and ``tokens_over`` with their
        fractions of all rows and of all tokens. Rows that the present limit has cut or dropped count as over every
        lower one. Limits above the present one are there only if it is known what they would hold.
    """
    known_over = {int(power): num_rows for power, num_rows in beyond["rows_over"].items()}
    known_tokens = {int(power): num_tokens for power, num_tokens in beyond["tokens_over"].items()}
    if beyond["max_length_tokens"] is not None:  # the longest row of all fits itself
        known_over[beyond["max_length_tokens"]] = known_tokens[beyond["max_length_tokens"]] = 0
    num_rows = len(lengths) + num_dropped
    lost = beyond["tokens_over_limit"]
    # Shares are taken of the rows as they were before the present limit.
    num_tokens = int(lengths.sum(dtype=np.int64)) + num_dropped * present + lost
    longest = int(lengths.max(initial=1))
    names: dict[int, list[str]] = {present: ["now"]}
    names |= {limit: [] for limit in _ROUND_LIMITS if limit < min(present, 2 * longest)}
    names |= {limit: ["longest"] if known_over[limit] == 0 else [] for limit in known_over}
    for name, share in _QUANTILE_LIMITS.items():
        quantile = int(np.quantile(lengths, share, method="higher")) if len(lengths) else 1
        if quantile == present:
            continue  # such rows may have been longer
        names.setdefault(quantile, []).append(name)
    # A limit that cuts more than half of the rows is no choice that anyone would make.
    shortest_of_use = int(np.quantile(lengths, 0.5, method="lower")) if len(lengths) else 0
    found: list[LimitChoice] = []
    for limit in sorted(names):
        if limit < shortest_of_use and limit != present:
            continue
        if limit < present:
            # Rows that were cut lie at the present limit now, but what was cut of them is known only as a sum.
            over = max(int((lengths > limit).sum()) + num_dropped, beyond["num_rows"])
            reaching = int(np.maximum(lengths - limit, 0).sum(dtype=np.int64))
            tokens = reaching + num_dropped * (present - limit) + lost
        elif limit == present:
            over, tokens = beyond["num_rows"], lost
        else:
            over, tokens = known_over[limit], known_tokens[limit]
        found.append(
            {
                "limit": limit,
                "named": names[limit],
                "rows_over": over,
                "rows_fraction": over / max(num_rows, 1),
                "tokens_over": tokens,
                "tokens_fraction": tokens / max(num_tokens, 1),
            }
        )
    return found
