"""What a user would not expect of the rows, their splits and their classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from lm_tuning.data.format.columns import SEQUENCE_CLASSIFICATION
from lm_tuning.data.split.class_shares import describe_moved
from lm_tuning.data.split.records import LostFacts, ShareFacts, UntrainedFacts
from lm_tuning.findings import Issue
from lm_tuning.preflight.records import DivisionFigures, Inspection, LabelFigures, LengthFigures
from lm_tuning.text.tokenizers.counts import CHANGED, DROPPED
from lm_tuning.wording import count_of, name_first

# What tokenizing changes that is worth a word, and what of it loses something that a row says.
_LOST = {"turn_left_out", "reasoning_left_out", "tools_left_out"}
_TOLD = {
    "content_not_verbatim",
    "not_round_trip",
    "control_token_kept",
    "answer_not_learned",
    "earlier_answer_shortened",
    *_LOST,
}

LimitName = Literal["max_length_tokens", "max_target_tokens"]
"""The parameters of ``tokenize`` that limit how long a row, or its target, may be."""
_FEW_ROWS_CUT = 0.01
_LIMIT_OF_REASON: dict[str, LimitName] = {
    DROPPED["too_long"]: "max_length_tokens",
    DROPPED["target_too_long"]: "max_target_tokens",
}


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


def about_rows(figures: Inspection) -> Iterator[Issue]:
    """Yield what reading and tokenizing did to the rows.

    Args:
        figures: what ``inspect_tokens`` has gathered.
    """
    num_read = figures["rows"]["num_rows_read"]
    # One line a kind, however many rows: the data report lists them.
    for kind, finding in figures["findings"].items():
        is_lost = finding["fate"] == "skipped"
        # Of all files together; each file has its own limit in data.max_bad_fraction, which was checked before.
        share = finding["num_rows"] / max(num_read, 1)
        what_became = "left out" if is_lost else "kept as they are"
        yield Issue(
            "warn" if is_lost and share > 0.01 else "note",
            "rows",
            f"{count_of(finding['num_rows'], 'row')} ({share:.2%}) {what_became}: {finding['meaning']} ({kind}).",
            "Their files, numbers and reasons are in the data report.",
        )
    for outcome in figures["rows"]["fates"]:
        if outcome["stage"].startswith("dropped"):
            share = outcome["num_rows"] / max(num_read, 1)
            limit = _LIMIT_OF_REASON.get(outcome["reason"])
            context_tokens = figures["context_tokens"]
            advice = f"{advise_limit(figures['lengths'], limit, context_tokens=context_tokens)} " if limit else ""
            yield Issue(
                "warn" if share > 0.01 else "note",
                "rows",
                f"{count_of(outcome['num_rows'], 'row')} {outcome['stage']}: {outcome['reason']}.",
                f"{advice}The data report names them.",
            )
    for reason, num_rows in figures["changed"].items():
        if reason in _TOLD:
            yield Issue(
                "warn" if reason in _LOST else "note",
                "rows",
                f"{count_of(num_rows, 'training row')}: {CHANGED[reason]}.",
                "The data report names the first.",
            )


def about_splits(splits: DivisionFigures, num_rows: Mapping[str, int]) -> Iterator[Issue]:
    """Yield what the division of the rows left.

    Args:
        splits: the figures of the splits.
        num_rows: rows by split.
    """
    for warning in splits["warnings"]:
        yield Issue("warn", "splits", warning, "See the part on splits in the data report.")
    # Rows with tokens: tokenizing may have dropped the few that were split off.
    held_out = num_rows["validation"] + num_rows["test"]
    if not held_out:
        yield Issue(
            "warn",
            "splits",
            "No row is held out: nothing will show whether the model got better or only learned the rows by heart.",
            "Set split.validation and split.test.",
        )
    elif held_out < 30:
        yield Issue(
            "note",
            "splits",
            f"Held out: only {count_of(held_out, 'row')}. What is measured on so few is mostly chance.",
            "Raise split.validation and split.test.",
        )
    copies = splits["duplicates"]
    total = sum(splits["rows"].values())
    # A few copies are in any set of texts; a tenth of them weighs those texts more than the others.
    if copies["num_kept"] > 0.1 * total:
        # Rows of one text under several labels stay unless the text alone makes a copy.
        keys = ["split.duplicates=drop"] if copies["handling"] != "drop" else []
        keys += ["split.duplicates_by=text"] if copies["num_label_conflicts"] > 0.1 * total or not keys else []
        left_out = f"{copies['num_dropped']:,}" if copies["num_dropped"] else "none"
        yield Issue(
            "note",
            "splits",
            f"Rows of the splits that repeat another one: {copies['num_kept']:,} of {total:,}; left out: {left_out}.",
            f"{' with '.join(keys)} keeps one of each text.",
        )


def about_labels(
    labels: LabelFigures | None,
    task: str,
    *,
    untrained: UntrainedFacts | None,
    lost: LostFacts | None,
    shares: ShareFacts | None,
) -> Iterator[Issue]:
    """Yield what the classes of the rows are like.

    Args:
        labels: the figures of the classes; ``None`` for rows without.
        task: the ``task`` parameter.
        untrained: classes that only held-out rows have.
        lost: classes whose rows were all left out as copies.
        shares: shares of the classes in the splits.
    """
    if labels is None:
        return
    # What the division did is among its own warnings; tokenizing may have dropped the rows of more classes.
    known: set[str] = set()
    for told_of in (untrained, lost):
        if told_of and told_of["column"] == labels["column"]:
            known.update(told_of["num_rows_by_class"])
    unlearned = [name for name in labels["not_in_train"] if name not in known]
    for remedy, names in (
        (
            "Divide with split.stratify, or take those rows out.",
            [name for name in unlearned if name not in labels["in_no_split"]],
        ),
        (
            "No split has a row of them either: look at what tokenizing dropped, or at what was left out before.",
            [name for name in unlearned if name in labels["in_no_split"]],
        ),
    ):
        if names:
            listed = name_first([repr(name) for name in names], 5)
            text = f"Classes without a training row ({len(names):,}) cannot be learned: {listed}."
            yield Issue("warn", "labels", text, remedy)
    if labels["num_held_out_missing"]:
        yield Issue(
            "note",
            "labels",
            f"Without a held-out row, so never measured: {labels['num_held_out_missing']:,} of "
            f"{count_of(labels['num_classes'], 'class', 'classes')}.",
            "Divide with split.stratify, or hold out more rows.",
        )
    # What the splits showed is among their warnings; tokenizing may have moved more.
    told = shares["moved"] if shares and shares["column"] == labels["column"] else {}
    for split, moved in labels["moved"].items():
        if moved and not told.get(split):
            yield Issue(
                "warn",
                "labels",
                f"Classes whose share differs a lot between train and {split}, by more than chance: "
                f"{describe_moved(moved, split=split)}.",
                "Divide with split.stratify, or give each class about the same share in files of your own.",
            )
    # An accuracy below this share looks good and is worse than no model.
    if labels["majority_fraction"] > 0.8 and labels["num_classes"] > 1:
        yield Issue(
            "warn",
            "labels",
            f"Always answering {labels['largest']!r} would be right for {labels['majority_fraction']:.1%} of the "
            "training rows.",
            "Compare results with this share, not with zero; measure each class by itself."
            + (" train.class_weights=balanced weighs rare classes more." if task == SEQUENCE_CLASSIFICATION else ""),
        )
