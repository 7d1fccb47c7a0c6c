"""Measure how long the rows are and what limits cut of them, and count their classes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from lm_tuning.data.format.columns import CAUSAL_LM, SEQ2SEQ_LM, SEQUENCE_CLASSIFICATION
from lm_tuning.data.records import SPLITS
from lm_tuning.data.split.class_shares import choose_shown, count_largest, list_moved, name_tied
from lm_tuning.data.split.records import SplitsSummary
from lm_tuning.data.store import open_examples
from lm_tuning.preflight.records import ClassCount, LabelFigures, LengthFigures, LimitChoice
from lm_tuning.reporting.document import Bars, Block, Paragraph, Table
from lm_tuning.reporting.text import write_percent
from lm_tuning.text.records import BeyondLimit, SplitTokens
from lm_tuning.text.store.table import Int32Array
from lm_tuning.text.summary import length_quantiles
from lm_tuning.text.tokenizers.classification import count_classes
from lm_tuning.wording import count_of

LimitName = Literal["max_length_tokens", "max_target_tokens"]
"""The parameters of ``tokenize`` that limit how long a row, or its target, may be."""

NUM_BINS = 60
MAX_LISTED = 1000
MAX_SHOWN = 30
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
_FEW_ROWS_CUT = 0.01
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


def advise_limit(facts: LengthFigures, name: LimitName = "max_length_tokens", *, context_tokens: int | None) -> str:
    """Name the lowest limit that cuts next to nothing, or the highest that the model takes."""
    compared = facts["limits"] if name == "max_length_tokens" else facts["target_limits"]
    choices = [choice for choice in compared if choice["limit"] > facts[name]]
    within = [choice for choice in choices if context_tokens is None or choice["limit"] <= context_tokens]
    for choice in within:
        if choice["rows_fraction"] <= _FEW_ROWS_CUT:
            what = f"cut {count_of(choice['rows_over'], 'row')}" if choice["rows_over"] else "hold every row"
            return f"tokenize.{name}={choice['limit']} would {what}, if model and memory allow."
    # None of the known limits cuts little enough, and the model is not what stands in the way.
    if len(within) == len(choices) or context_tokens is None:
        return f"Raise tokenize.{name}."
    apart = "shorten or split the longer rows, or take a model for longer ones"
    if facts[name] >= context_tokens:
        return f"The model takes {context_tokens:,} tokens at most, so {apart}."
    left = f", which would cut {count_of(within[-1]['rows_over'], 'row')} or fewer" if within else ""
    return f"The model takes {context_tokens:,} tokens at most: tokenize.{name}={context_tokens}{left}; else {apart}."


def count_labels(
    splits: Path, split_summary: SplitsSummary, *, rows_by_class: Mapping[str, Mapping[str, int]] | None = None
) -> LabelFigures | None:
    """Count rows by class and split: by the label of labelled rows, else by the column that strata come from.

    Args:
        splits: folder of stored splits.
        split_summary: its summary.
        rows_by_class: rows with tokens by split and class, where classes are what is supervised; they count then.

    Returns:
        ``column``; ``num_classes``; ``classes``: ``name`` and rows by split, the largest in train first (at most
        1,000); ``majority_fraction`` of the training rows; ``largest`` and ``smallest`` class in train;
        ``not_in_train``: classes without a row in train; ``in_no_split``: those of them without any row, which the
        label map still has; ``num_held_out_missing``: classes that neither validation nor test has;
        ``num_largest``: equally frequent classes of train that none is larger than; ``shown``: some 30 of ``classes``,
        the largest of each split among them; ``num_rows_by_split``;
        ``best_by_split``: the largest class of each held-out split with rows: ``name``, ``num_largest`` and
        ``fraction``; ``moved``: see ``list_moved``, by held-out split. ``None`` for rows without classes.
    """
    tables = {split: open_examples(splits, split) for split in SPLITS}
    # What is supervised comes first: tokenizing may have dropped the rows that the splits still hold.
    if rows_by_class is not None:
        column = _label_column(split_summary)
        counts = {split: Counter(rows_by_class[split]) for split in SPLITS}
    elif tables["train"].format == "text_label":
        column = _label_column(split_summary)
        counts = {split: count_classes(table) for split, table in tables.items()}
    elif classes := split_summary["classes"]:
        column = classes["column"]
        by_class = classes["rows_by_split"].items()
        counts = {split: Counter({name: rows[split] for name, rows in by_class}) for split in SPLITS}
    else:
        return None
    # By name where rows are equal, so that the order does not hang on that of a set.
    names = sorted(set().union(*counts.values()), key=lambda name: (-counts["train"][name], name))
    train = counts["train"]
    present = [name for name in names if train[name]]
    is_held_out = {name: bool(counts["validation"][name] or counts["test"][name]) for name in names}
    # (classes,), in the order of the names
    by_split = {split: np.array([counts[split][name] for name in names], dtype=np.int64) for split in SPLITS}
    listed: list[ClassCount] = [
        {"name": name, "train": train[name], "validation": counts["validation"][name], "test": counts["test"][name]}
        for name in names
    ]
    return {
        "column": column,
        "num_classes": len(names),
        "num_rows": sum(train.values()),
        "num_rows_by_split": {split: int(rows.sum()) for split, rows in by_split.items()},
        "classes": listed[:MAX_LISTED],
        "shown": [listed[index] for index in choose_shown(list(by_split.values()), most=MAX_SHOWN)],
        "majority_fraction": train[present[0]] / sum(train.values()) if present else 0.0,
        "largest": present[0] if present else None,
        "num_largest": count_largest(by_split["train"]),
        "best_by_split": {
            split: {
                "name": names[int(rows.argmax())],
                "num_largest": count_largest(rows),
                "fraction": int(rows.max()) / int(rows.sum()),
            }
            for split, rows in by_split.items()
            if split != "train" and rows.any()
        },
        "moved": {
            split: list_moved(by_split["train"], rows, names) for split, rows in by_split.items() if split != "train"
        },
        "smallest": present[-1] if present else None,
        "not_in_train": [name for name in names if not train[name]][:MAX_LISTED],
        "in_no_split": [name for name in names if not train[name] and not is_held_out[name]][:MAX_LISTED],
        "num_held_out_missing": sum(not is_held_out[name] for name in names),
    }


def lay_out_labels(facts: LabelFigures, *, are_supervised: bool) -> Iterator[Block]:
    """Write what the report shows of the classes.

    Args:
        facts: see ``count_labels``.
        are_supervised: whether the class is what is supervised of a row.
    """
    column = facts["column"]
    if are_supervised:
        num_classes = facts["num_classes"]
        yield Paragraph(
            f"Each row has one of {num_classes:,} classes. A model that knows nothing starts at "
            # Of even odds; frequencies that are far from even make the best constant guess cheaper.
            f"a loss of about log({num_classes}) = {math.log(num_classes):.2f} nats per row."
        )
    yield Paragraph(
        f"{count_of(facts['num_classes'], 'class', 'classes')} in column {column!r}. The majority class of the "
        f"training rows is {name_tied(repr(facts['largest']), facts['num_largest'])}; always answering it would be "
        f"right for {write_percent(facts['majority_fraction'])} of them. The rarest is {facts['smallest']!r}. "
        + " ".join(
            f"The best constant answer on {split} is {name_tied(repr(best['name']), best['num_largest'])}, right for "
            f"{write_percent(best['fraction'])}."
            for split, best in facts["best_by_split"].items()
        )
    )
    classes = facts["classes"]
    # Both ends: a class with one row is as telling as the one that most rows have.
    shown = classes if len(classes) <= MAX_SHOWN else [*classes[: MAX_SHOWN // 2], *classes[-MAX_SHOWN // 2 :]]
    title = "Training rows by class"
    if len(shown) < facts["num_classes"]:
        title += f" (the {MAX_SHOWN // 2} most frequent and the {MAX_SHOWN // 2} rarest)"
    yield Bars(
        title,
        [one["name"] for one in shown],
        [one["train"] for one in shown],
        [f"{one['train']:,} ({write_percent(one['train'] / max(facts['num_rows'], 1))})" for one in shown],
    )
    of_split = {split: max(num_rows, 1) for split, num_rows in facts["num_rows_by_split"].items()}
    title = "Rows by class and split"
    if len(facts["shown"]) < facts["num_classes"]:
        title += " (the largest of each split)"
    yield Table(
        title,
        ["class", *SPLITS],
        [
            [
                one["name"],
                *(
                    f"{count:,} ({write_percent(count / of_split[split])})"
                    for split, count in zip(SPLITS, (one["train"], one["validation"], one["test"]), strict=True)
                ),
            ]
            for one in facts["shown"]
        ],
        is_brief=False,
    )


def _label_column(split_summary: SplitsSummary) -> str:
    return (split_summary.get("columns") or {}).get("label") or "label"
