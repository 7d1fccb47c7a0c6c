"""Gather what a user would not expect, the gravest first, each with what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from lm_tuning.data.format.columns import CAUSAL_LM, SEQ2SEQ_LM, SEQUENCE_CLASSIFICATION
from lm_tuning.data.split.class_shares import describe_moved
from lm_tuning.findings import SEVERITIES, SEVERITY_WORDS, Issue, gravest_first
from lm_tuning.preflight.records import Inspection, StoredIssue
from lm_tuning.preflight.rows import LimitName, advise_limit
from lm_tuning.preflight.steps import chosen_way
from lm_tuning.text.tokenizers.counts import CHANGED, DROPPED
from lm_tuning.wording import count_of, name_first

_FEW_STEPS = 20
# What tokenizing changes that is worth a word, and what of it loses something that a row says.
_LOST = {"turn_left_out", "reasoning_left_out", "tools_left_out"}
_TOLD = {
    *("content_not_verbatim", "not_round_trip", "control_token_kept", "answer_not_learned", "earlier_answer_shortened"),
    *_LOST,
}
_LIMIT_OF_REASON: dict[str, LimitName] = {
    DROPPED["too_long"]: "max_length_tokens",
    DROPPED["target_too_long"]: "max_target_tokens",
}


def find_issues(figures: Inspection) -> list[Issue]:
    """Look through all figures.

    Args:
        figures: what ``inspect_tokens`` has gathered.

    Returns:
        The issues, the gravest first; the kind of each is the section of the report that it belongs to.
    """
    looks = (
        *(_about_schedule, _about_vocabulary, _about_tokens, _about_lengths, _about_context),
        *(_about_rows, _about_splits, _about_labels, _about_padding),
    )
    return gravest_first(issue for look in looks for issue in look(figures))


def _makers_of(section: str) -> tuple[partial[Issue], ...]:
    """Return what makes the issues of a section of the report: to stop for, to be warned of, and to note."""
    return tuple(partial(Issue, severity, section) for severity in SEVERITIES)


def store_issue(issue: Issue) -> StoredIssue:
    """Return an issue as ``preflight.json`` holds it.

    Args:
        issue: see `find_issues`.
    """
    return {"level": SEVERITY_WORDS[issue.severity], "section": issue.kind, "text": issue.message, "advice": issue.fix}


def read_issue(stored: StoredIssue) -> Issue:
    """Return what `store_issue` was given.

    Args:
        stored: one of ``concerns``.
    """
    severity = next(severity for severity, word in SEVERITY_WORDS.items() if word == stored["level"])
    return Issue(severity, stored["section"], stored["text"], stored["advice"])


def _about_schedule(figures: Inspection) -> Iterator[Issue]:
    stop, warn, note = _makers_of("schedule")
    facts, longest = figures["schedule"], figures["lengths"]["quantiles"]["row"]["max"]
    steps, per_epoch, warmup = facts["total_steps"], facts["steps_per_epoch"], facts["warmup_steps_of_run"]
    rows, tokens = facts["effective_batch_rows"], facts["effective_batch_tokens"]
    rows_per_step = facts["rows_per_epoch"] / per_epoch
    # The same condition as in training, which refuses: the rate would never reach its peak.
    if warmup and warmup >= steps:
        yield stop(
            f"The warm-up takes {count_of(warmup, 'step')}, but the run has {steps:,}: training refuses to start.",
            "Lower train.trainer.warmup_steps (below 1 it is a fraction of all steps), or train for longer.",
        )
    # More than half at a rising rate leaves little of a schedule that was meant to fall.
    elif warmup > steps // 2:
        yield warn(
            f"The warm-up takes {warmup:,} of {count_of(steps, 'step')}.",
            "Lower train.trainer.warmup_steps; 0.03 to 0.1 of the steps is usual.",
        )
    if facts["load_best"] and not figures["num_rows"]["validation"]:
        yield stop(
            "train.load_best compares validation losses, and there are no validation rows: training refuses to start.",
            "Set split.validation or data.validation_path, or train.load_best to false.",
        )
    # Epochs are counted in steps, so this holds whatever the batch is measured in.
    if facts["epochs"] < 1:
        yield warn(
            f"The run ends after {facts['epochs']:.2f} epochs: {1 - facts['epochs']:.0%} of the rows are never seen.",
            "Raise train.max_steps, unless this is only a trial.",
        )
    if rows is not None and rows > facts["rows_per_epoch"]:
        yield warn(
            f"A step takes {count_of(rows, 'row')}, but an epoch has {facts['rows_per_epoch']:,}: each epoch is a "
            "single step.",
            "Lower train.effective_batch_rows to at most a tenth of the rows.",
        )
    # A run that ends before has no such step, and an epoch of a single one has no others to compare it with.
    elif per_epoch > 1 and steps >= per_epoch and facts["last_step_rows"] * 2 < rows_per_step:
        yield note(
            f"The last step of every epoch has {count_of(facts['last_step_rows'], 'row')}, where the others have about "
            f"{rows_per_step:,.0f}: its gradient is noisier.",
            "It weighs as much as any other step; a batch size that divides the rows evenly avoids it.",
        )
    # No row is split over steps, so the batch does not bound a row that is longer.
    if tokens is not None and tokens < longest:
        yield warn(
            f"A step takes at most {count_of(tokens, 'token')}, but rows have up to {longest:,}: such a row is a "
            "step by itself.",
            "Raise train.effective_batch_tokens to several times the longest row.",
        )
    if steps < _FEW_STEPS:
        yield note(
            f"The whole run has {count_of(steps, 'step')}, which is few for a schedule to mean anything.",
            "Lower the effective batch, or train for more epochs.",
        )
    for name, every, what in (
        ("eval_every_steps", facts["eval_every_steps"], "validation loss is measured"),
        ("save_every_steps", facts["save_every_steps"], "checkpoint is made"),
    ):
        if every and every > steps:
            yield note(
                f"train.{name} is {every:,}, but the run has {count_of(steps, 'step')}: no {what} on the way.",
                f"Lower train.{name}.",
            )


def _about_vocabulary(figures: Inspection) -> Iterator[Issue]:
    stop, *_ = _makers_of("special_tokens")
    facts = figures["vocabulary"]
    num_tokens, num_embeddings = facts["num_tokens"], facts["num_embeddings"]
    if num_embeddings is None:
        return
    # Held-out rows as well: the embedding is asked for their ids when their loss is measured.
    beyond = {split: number for split, number in facts["num_rows_beyond"].items() if number}
    advice = (
        "Take the tokenizer that belongs to the model, or enlarge the embedding once (resize_token_embeddings) and "
        "save the model; then run the tokenize pipeline again."
    )
    if beyond:
        rows = ", ".join(count_of(number, f"{split} row") for split, number in beyond.items())
        ids = ", ".join(f"{token_id} ({token!r})" for token_id, token in facts["ids_beyond"].items())
        first = next(facts["rows_beyond"][split][0] for split in beyond)
        hold = "holds" if sum(beyond.values()) == 1 else "hold"
        yield stop(
            f"The model embeds {num_embeddings:,} token ids and the tokenizer has {num_tokens:,}: {rows} {hold} ids "
            f"that the model does not know, such as {ids}; the first such row has the id {first}. Training refuses to "
            "start.",
            advice,
        )
    # The other way round is usual: embeddings are padded to a round size for the sake of speed.
    elif num_tokens > num_embeddings:
        yield stop(
            f"The tokenizer has {num_tokens:,} tokens and the model embeds {num_embeddings:,}. Training refuses to "
            "start, although no row has such a token yet.",
            advice,
        )


def _about_tokens(figures: Inspection) -> Iterator[Issue]:
    advice = {
        "Does the model learn to stop?": "Use a chat template that ends each answer with the model's EOS token; where "
        "ends were cut, raise tokenize.max_length_tokens as far as the model goes, or shorten the rows.",
        **{
            f"Does each {noun} begin once?": "Take the token out of the data or the chat template, so that one of them "
            "writes it."
            for noun in ("row", "source", "target")
        },
        "Does each source end?": "Tokenize again: kedro run --pipelines=tokenize.",
        "Is padding told apart from the end?": "Nothing to do here.",
    }
    # What is only worth a note stands in the table of questions and would drown the rest here.
    for judgement in figures["special_tokens"]["judgements"]:
        if judgement["verdict"] == "bad":
            yield Issue("warn", "special_tokens", judgement["answer"], advice[judgement["question"]])
    _, warn, note = _makers_of("lengths")
    empty = figures["lengths"]["num_rows_without_learned"]
    if empty:
        yield warn(f"No token is supervised in {count_of(empty, 'training row')}.", "Look at tokenize.loss_on.")
    supervised_fraction = figures["lengths"]["supervised_fraction"]
    # Of other tasks the share says little of the time: a classifier has none, and an encoder reads a source only once.
    if supervised_fraction is not None and figures["task"] == CAUSAL_LM and supervised_fraction < 0.02:
        yield note(
            f"Only {supervised_fraction:.2%} of the tokens are supervised: nearly all the time goes into reading "
            "prompts.",
            "Shorten the prompts if they allow it; tokenize.loss_on says what is supervised.",
        )


def _about_lengths(figures: Inspection) -> Iterator[Issue]:
    facts, task, context_tokens = figures["lengths"], figures["task"], figures["context_tokens"]
    cut, num_rows = facts["num_rows_cut"], facts["num_rows"]
    by_length = f"tokenize.max_length_tokens={facts['max_length_tokens']}"
    advice = advise_limit(facts, context_tokens=context_tokens)
    # A cut end of what is supervised is worth a warning from the first row on: it teaches to stop in the middle.
    if task == SEQUENCE_CLASSIFICATION:
        shortened = cut["end_cut"] + cut["text_shortened"]
        yield from _about_cut("text", shortened, num_rows, f"{by_length}.", advice)
    elif task == SEQ2SEQ_LM:
        yield from _about_cut("source", cut["source_cut"], num_rows, f"{by_length}.", advice)
        yield from _about_cut(
            "end of the target",
            cut["target_cut"],
            num_rows,
            f"tokenize.max_target_tokens={facts['max_target_tokens']}: the model learns to stop in the middle.",
            advise_limit(facts, "max_target_tokens", context_tokens=context_tokens),
            tolerated=0.0,
        )
    else:
        yield from _about_cut(
            "end of the answer",
            cut["answer_shortened"] + cut["end_cut"],
            num_rows,
            f"{by_length}: the model learns answers without an end.",
            advice,
            tolerated=0.0,
        )
        # A row may count under both, so the sum would count some twice.
        shortened = max(cut["prompt_shortened"], cut["old_turns_dropped"])
        yield from _about_cut("prompt", shortened, num_rows, f"{by_length}.", advice)
    emptied = cut["prompt_emptied"]
    if emptied:
        yield Issue(
            "warn",
            "lengths",
            f"Nothing is left of a prompt, or of one of its columns or turns, in {count_of(emptied, 'training row')} "
            f"({emptied / num_rows:.2%}) by {by_length}.",
            advice,
        )


def _about_cut(
    what: str, num_cut: int, num_rows: int, reason: str, advice: str, *, tolerated: float = 0.01
) -> Iterator[Issue]:
    """Warn of rows that a limit cuts; a share of them that can be tolerated is worth a note."""
    if num_cut:
        yield Issue(
            "warn" if num_cut > tolerated * num_rows else "note",
            "lengths",
            f"The {what} is cut in {count_of(num_cut, 'training row')} ({num_cut / num_rows:.2%}) by {reason}",
            advice,
        )


def _about_context(figures: Inspection) -> Iterator[Issue]:
    quantiles, context_tokens = figures["lengths"]["quantiles"], figures["context_tokens"]
    # An encoder-decoder has room for a source and, apart from that, for a target.
    parts = {"source": "max_length_tokens", "target": "max_target_tokens"}
    if "source" not in quantiles:
        parts = {"row": "max_length_tokens"}
    for part, name in parts.items():
        longest = quantiles[part]["max"]
        if context_tokens is not None and longest > context_tokens:
            yield Issue(
                "warn",
                "lengths",
                f"{part.capitalize()}s have up to {count_of(longest, 'token')}, but the model is made for "
                f"{context_tokens:,}.",
                f"Set tokenize.{name} to {context_tokens} at most.",
            )


def _about_padding(figures: Inspection) -> Iterator[Issue]:
    _, warn, note = _makers_of("padding")
    padding = figures["padding"]
    fraction = chosen_way(padding)["padding_fraction"]
    # A packed batch has no padding at all, so this is about padded ones.
    if fraction > 0.2:
        advice = "A larger effective batch lets rows of like length come together."
        if any(choice["name"] == "packed" for choice in padding["choices"]):
            advice = f"train.batching=packed leaves none; {advice[0].lower()}{advice[1:]}"
        yield warn(f"{fraction:.0%} of all positions would be padding.", advice)
    if padding["num_rows_over_budget"]:
        yield note(
            f"Longer than a micro-batch of {padding['micro_batch_tokens']:,} tokens: "
            f"{count_of(padding['num_rows_over_budget'], 'row')}. Each passes alone, and memory is set by the longest.",
            "Raise train.micro_batch_tokens if memory allows, or lower tokenize.max_length_tokens.",
        )


def _about_rows(figures: Inspection) -> Iterator[Issue]:
    _, warn, note = _makers_of("rows")
    num_read = max(figures["rows"]["num_rows_read"], 1)
    # One line a kind, however many rows: the data report lists them.
    for kind, finding in figures["findings"].items():
        is_lost = finding["fate"] == "skipped"
        # Of all files together; each file has its own limit in data.max_bad_fraction, which was checked before.
        share = finding["num_rows"] / num_read
        what_became = "left out" if is_lost else "kept as they are"
        yield (warn if is_lost and share > 0.01 else note)(
            f"{count_of(finding['num_rows'], 'row')} ({share:.2%}) {what_became}: {finding['meaning']} ({kind}).",
            "Their files, numbers and reasons are in the data report.",
        )
    for outcome in figures["rows"]["fates"]:
        if outcome["stage"].startswith("dropped"):
            limit = _LIMIT_OF_REASON.get(outcome["reason"])
            context_tokens = figures["context_tokens"]
            advice = f"{advise_limit(figures['lengths'], limit, context_tokens=context_tokens)} " if limit else ""
            yield (warn if outcome["num_rows"] / num_read > 0.01 else note)(
                f"{count_of(outcome['num_rows'], 'row')} {outcome['stage']}: {outcome['reason']}.",
                f"{advice}The data report names them.",
            )
    for reason, num_rows in figures["changed"].items():
        if reason in _TOLD:
            text = f"{count_of(num_rows, 'training row')}: {CHANGED[reason]}."
            yield (warn if reason in _LOST else note)(text, "The data report names the first.")


def _about_splits(figures: Inspection) -> Iterator[Issue]:
    _, warn, note = _makers_of("splits")
    splits, num_rows = figures["splits"], figures["num_rows"]
    for warning in splits["warnings"]:
        yield warn(warning, "See the part on splits in the data report.")
    # Rows with tokens: tokenizing may have dropped the few that were split off.
    held_out = num_rows["validation"] + num_rows["test"]
    if not held_out:
        yield warn(
            "No row is held out: nothing will show whether the model got better or only learned the rows by heart.",
            "Set split.validation and split.test.",
        )
    elif held_out < 30:
        yield note(
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
        yield note(
            f"Rows of the splits that repeat another one: {copies['num_kept']:,} of {total:,}; left out: {left_out}.",
            f"{' with '.join(keys)} keeps one of each text.",
        )


def _about_labels(figures: Inspection) -> Iterator[Issue]:
    _, warn, note = _makers_of("labels")
    labels, splits = figures["labels"], figures["splits"]
    if labels is None:
        return
    # What the division did is among its own warnings; tokenizing may have dropped the rows of more classes.
    known: set[str] = set()
    for told_of in (splits["untrained_classes"], splits["lost_classes"]):
        if told_of and told_of["column"] == labels["column"]:
            known.update(told_of["num_rows_by_class"])
    unlearned = [name for name in labels["not_in_train"] if name not in known]
    for is_nowhere, remedy in (
        (False, "Divide with split.stratify, or take those rows out."),
        (True, "No split has a row of them either: look at what tokenizing dropped, or at what was left out before."),
    ):
        names = [name for name in unlearned if (name in labels["in_no_split"]) == is_nowhere]
        if names:
            listed = name_first([repr(name) for name in names], 5)
            text = f"Classes without a training row ({len(names):,}) cannot be learned: {listed}."
            yield warn(text, remedy)
    if labels["num_held_out_missing"]:
        yield note(
            f"Without a held-out row, so never measured: {labels['num_held_out_missing']:,} of "
            f"{count_of(labels['num_classes'], 'class', 'classes')}.",
            "Divide with split.stratify, or hold out more rows.",
        )
    # What the splits showed is among their warnings; tokenizing may have moved more.
    shares = splits["class_shares"]
    told = shares["moved"] if shares and shares["column"] == labels["column"] else {}
    for split, moved in labels["moved"].items():
        if moved and not told.get(split):
            yield warn(
                f"Classes whose share differs a lot between train and {split}, by more than chance: "
                f"{describe_moved(moved, split=split)}.",
                "Divide with split.stratify, or give each class about the same share in files of your own.",
            )
    # An accuracy below this share looks good and is worse than no model.
    if labels["majority_fraction"] > 0.8 and labels["num_classes"] > 1:
        is_supervised = figures["task"] == SEQUENCE_CLASSIFICATION
        yield warn(
            f"Always answering {labels['largest']!r} would be right for {labels['majority_fraction']:.1%} of the "
            "training rows.",
            "Compare results with this share, not with zero; measure each class by itself."
            + (" train.class_weights=balanced weighs rare classes more." if is_supervised else ""),
        )
