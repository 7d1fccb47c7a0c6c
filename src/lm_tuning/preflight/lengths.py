"""Measure how long the rows are, what the limit cuts, and what other limits would cut."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from lm_tuning.text.summary import length_quantiles
from lm_tuning.text.token_table import Int32Array

NUM_BINS = 60
SHORTENED = ("old_turns_dropped", "prompt_shortened", "answer_shortened", "end_cut")
"""What tokenizing counts when a row is made to fit; each row counts under one or two of them."""

_ROUND_LIMITS = tuple(2**power for power in range(5, 18))
_QUANTILE_LIMITS = {"p95": 0.95, "p99": 0.99, "p99.9": 0.999, "longest": 1.0}


def measure_lengths(
    lengths: Int32Array, num_supervised: Int32Array, *, max_length_tokens: int, summary: Mapping[str, Any]
) -> dict[str, Any]:
    """Describe the lengths of the training rows.

    Args:
        lengths: tokens of each row, ``(rows,)``.
        num_supervised: learned tokens of each row, ``(rows,)``.
        max_length_tokens: the limit that the rows were cut to.
        summary: what tokenizing says about this split: ``changed``, ``dropped`` and, where rows were too long,
            ``too_long``.

    Returns:
        Quantiles in tokens of the whole row, its prompt (what is not learned) and its answer (what is), a histogram,
        the share of learned tokens, rows at the limit, and ``limits``, see ``compare_limits``.
    """
    num_tokens = int(lengths.sum(dtype=np.int64))
    num_learned = int(num_supervised.sum(dtype=np.int64))
    at_limit = int((lengths >= max_length_tokens).sum())
    return {
        "num_rows": len(lengths),
        "num_tokens": num_tokens,
        "num_supervised_tokens": num_learned,
        "supervised_fraction": num_learned / num_tokens if num_tokens else 0.0,
        "num_rows_without_learned": int((num_supervised == 0).sum()),
        "max_length_tokens": max_length_tokens,
        "num_rows_at_limit": at_limit,
        "at_limit_fraction": at_limit / max(len(lengths), 1),
        "num_rows_cut": {name: summary["changed"].get(name, 0) for name in SHORTENED},
        "quantiles": {
            "row": length_quantiles(lengths),
            "prompt": length_quantiles(lengths - num_supervised),
            "answer": length_quantiles(num_supervised),
        },
        "histogram": draw_histogram(lengths, num_supervised),
        "limits": compare_limits(lengths, max_length_tokens=max_length_tokens, summary=summary),
    }


def draw_histogram(lengths: Int32Array, num_supervised: Int32Array) -> dict[str, list[int]]:
    """Count rows by length, in bins of equal width.

    Args:
        lengths: tokens of each row, ``(rows,)``.
        num_supervised: learned tokens of each row, ``(rows,)``.

    Returns:
        ``edges`` ``(bins + 1,)`` in tokens, the last one beyond the longest row, and the rows in each bin by whole
        length (``row``) and by learned part (``answer``).
    """
    width = math.ceil((int(lengths.max(initial=0)) + 1) / NUM_BINS)
    num_bins = math.ceil((int(lengths.max(initial=0)) + 1) / width)
    return {
        "edges": [place * width for place in range(num_bins + 1)],
        "row": np.bincount(lengths // width, minlength=num_bins).tolist(),
        "answer": np.bincount(num_supervised // width, minlength=num_bins).tolist(),
    }


def compare_limits(lengths: Int32Array, *, max_length_tokens: int, summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Say what each choice of ``tokenize.max_length_tokens`` would cut.

    Args:
        lengths: tokens of each row as they are now, ``(rows,)``.
        max_length_tokens: the present limit.
        summary: of the split. ``too_long`` holds what is known of rows beyond the present limit: ``num_rows``,
            ``max_length_tokens``, ``tokens_over_limit`` (what is cut now) and, by powers of two above the limit as
            text, ``rows_over`` and ``tokens_over``; the powers that are missing cut nothing.

    Returns:
        For each limit, ascending: ``limit``, why it is ``named``, ``rows_over`` and ``tokens_over`` with their
        fractions of all rows and of all tokens. Rows that the present limit has cut or dropped count as over every
        lower one. Limits above the present one are there only if it is known what they would hold.
    """
    beyond = summary["too_long"]
    known_over = {int(limit): num_rows for limit, num_rows in beyond["rows_over"].items()}
    known_tokens = {int(limit): num_tokens for limit, num_tokens in beyond["tokens_over"].items()}
    if beyond["num_rows"]:  # the longest row of all fits itself
        known_over[beyond["max_length_tokens"]] = known_tokens[beyond["max_length_tokens"]] = 0
    num_dropped = summary["dropped"].get("too_long", 0) + summary["dropped"].get("no_answer_left", 0)
    num_rows = len(lengths) + num_dropped
    lost = beyond["tokens_over_limit"]
    # Shares are taken of the rows as they were before the present limit.
    num_tokens = int(lengths.sum(dtype=np.int64)) + num_dropped * max_length_tokens + lost
    longest = int(lengths.max(initial=1))
    names: dict[int, list[str]] = {max_length_tokens: ["now"]}
    names |= {limit: [] for limit in _ROUND_LIMITS if limit < min(max_length_tokens, 2 * longest)}
    names |= {limit: ["longest"] if known_over[limit] == 0 else [] for limit in known_over}
    for name, share in _QUANTILE_LIMITS.items():
        quantile = int(np.quantile(lengths, share, method="higher")) if len(lengths) else 1
        if quantile == max_length_tokens:
            continue  # such rows may have been longer
        names.setdefault(quantile, []).append(name)
    shortest_of_use = int(np.quantile(lengths, 0.5, method="lower")) if len(lengths) else 0
    found = []
    for limit in sorted(names):
        if limit < shortest_of_use and limit != max_length_tokens:
            continue
        if limit < max_length_tokens:
            over = max(int((lengths > limit).sum()) + num_dropped, beyond["num_rows"])
            reaching = int(np.maximum(lengths - limit, 0).sum(dtype=np.int64))
            tokens = reaching + num_dropped * (max_length_tokens - limit) + lost
        elif limit == max_length_tokens:
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
