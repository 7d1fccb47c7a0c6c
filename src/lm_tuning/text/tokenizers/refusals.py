"""Refuse to go on after tokenizing: for unusable rows, forbidden ones, and limits that take too much away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from lm_tuning.data.check.account import HOW_TO_FIX, find_excesses
from lm_tuning.data.check.findings import RowPositions
from lm_tuning.data.format.columns import SEQ2SEQ_LM, SEQUENCE_CLASSIFICATION
from lm_tuning.data.records import SPLITS, FileRows, ReadRows
from lm_tuning.data.store import ExampleTable
from lm_tuning.errors import UserError
from lm_tuning.parameters.data import TokenizeParameters
from lm_tuning.text.records import LimitLosses, TokenSummary
from lm_tuning.text.render.chat_template import REFUSED
from lm_tuning.text.render.control_tokens import TYPED
from lm_tuning.text.render.plain import ALTERED
from lm_tuning.text.store.table import Int32Array, TokenTable
from lm_tuning.text.tokenizers.classification import count_classes
from lm_tuning.text.tokenizers.counts import DROPPED, UNUSABLE, LongRows, SplitCounts, name_rows
from lm_tuning.text.tokenizers.seq2seq import TARGET_TOO_LONG
from lm_tuning.text.tokenizers.truncation import CUTTING, TOO_LONG
from lm_tuning.wording import count_of, name_first, shorten

_NUM_ROWS_NAMED = 20
# Different reasons that are spelled out for a split; a template may name the row in each of its messages.
_NUM_GROUPS = 10
# Why a row is refused before the template is given it.
_BEFORE_TEMPLATE = ("no_assistant_turn", "control_token", "tool_arguments_not_json")


def find_unusable(
    counts: Mapping[str, SplitCounts], files: Sequence[FileRows], *, on_bad_row: str, max_bad_fraction: float
) -> list[str]:
    """Describe why rows that cannot be rendered or tokenized forbid going on with the others.

    Args:
        counts: what happened to the rows, by split.
        files: where the rows come from, see ``CheckedRows.sources``: rows that were skipped in reading count as well.
        on_bad_row: ``error`` lets no such row pass, ``skip`` a share of them.
        max_bad_fraction: that share, of any file and of all files together. Up to 3 bad rows always pass, unless it is
            0.

    Returns:
        One sentence per problem, with the rows and how to fix them; none when all is well.
    """
    if not any(of_split.counts[reason] for of_split in counts.values() for reason in UNUSABLE):
        return []
    positions = RowPositions(files)
    excesses = find_excesses(_all_skipped(counts, files, positions), max_bad_fraction)
    how_to_fix = HOW_TO_FIX
    if excesses:
        how_to_fix = (
            "Fix these rows, or leave so many out and have them counted with data.on_bad_row: skip and a "
            "data.max_bad_fraction above their share."
        )
    elif on_bad_row == "skip":
        return []
    groups = [line for split, of_split in counts.items() for line in _describe_groups(split, of_split, positions)]
    return [*groups, *excesses, how_to_fix]


def find_template_fault(counts: Mapping[str, SplitCounts], positions: RowPositions, *, template: str) -> list[str]:
    """Report once a chat template that refuses every row that it is given; then no row is to be fixed.

    Args:
        counts: what happened to the rows, by split.
        positions: where rows stand in their files.
        template: names the template, to begin a sentence with.

    Returns:
        One sentence with the template's own words for the first row; none where it takes a row.
    """
    num_given = sum(
        of_split.num_read - sum(of_split.counts[reason] for reason in _BEFORE_TEMPLATE) for of_split in counts.values()
    )
    num_refused = sum(of_split.counts[REFUSED] for of_split in counts.values())
    if not num_refused or num_refused < num_given:
        return []
    first = next(of_split for of_split in counts.values() if of_split.counts[REFUSED])
    row_id = first.rows(REFUSED)[0]
    file, number = positions.find(row_id)
    return [
        f"{template} (see model.name_or_path) refuses every row that it is given ({count_of(num_refused, 'row')}). Of "
        f"{file}, row {number}, it says: {first.detail(REFUSED, row_id).rstrip('. ')}. Fix: repair the template "
        "(chat_template.jinja in the model's folder), take another model, or change the rows to what it takes."
    ]


def _all_skipped(
    counts: Mapping[str, SplitCounts], files: Sequence[FileRows], positions: RowPositions
) -> list[ReadRows]:
    """Return the files with the rows that reading skipped and those that turned out to be unusable since."""
    found = [Counter(file["rows_skipped"]) for file in files]
    names = positions.names
    for of_split in counts.values():
        for reason in UNUSABLE:
            for name, numbers in positions.by_file(of_split.rows(reason)):
                found[names.index(name)][reason] += len(numbers)
    return [
        {"path": name, "rows_read": file["rows_read"], "rows_skipped": dict(kinds)}
        for name, file, kinds in zip(names, files, found, strict=True)
    ]


def _describe_groups(split: str, counts: SplitCounts, positions: RowPositions) -> list[str]:
    """Write one line for all rows of a split that have the same reason."""
    lines = []
    for reason in UNUSABLE:
        groups = counts.by_detail(reason)
        for detail, rows in list(groups.items())[:_NUM_GROUPS]:
            where = name_rows(rows, positions, num_named=_NUM_ROWS_NAMED)
            number = count_of(len(rows), f"{split} row")
            lines.append(f"{where}: {number} cannot be used ({DROPPED[reason]}){f': {detail}' if detail else '.'}")
        rest = sum(map(len, list(groups.values())[_NUM_GROUPS:]))
        if rest:
            number = count_of(rest, f"more {split} row")
            lines.append(f"{number} cannot be used ({DROPPED[reason]}), each for another reason.")
    return lines


# What tokenizing counts for rows that were made to fit; the whole row was too long, or its source or target.
_SHORTENED = (
    *("old_turns_dropped", "prompt_shortened", "prompt_emptied", "answer_shortened", "end_cut", "text_shortened"),
    "source_cut",
)
_LOST_TO_LENGTH = ("too_long", "no_answer_left", "no_text_left")
_LOST_TO_TARGET = ("target_too_long", "no_target_left")
_MAX_NAMED = 10


def measure_losses(table: TokenTable, counts: SplitCounts, *, task: str) -> LimitLosses:
    """Count the tokens that the limits cut out of the rows of a split, dropped rows included.

    Args:
        table: the rows that are left.
        counts: what happened to the rows.
        task: the ``task`` parameter.

    Returns:
        ``num_tokens_lost``, and ``fraction`` of all tokens that the rows had; of a dropped row of source and target the
        part that was too long counts.
    """
    # (rows,): what the limit is about
    whole = table.lengths - table.num_supervised if task == SEQ2SEQ_LM else table.lengths
    lost = _lost(counts.long_rows, whole, table, counts, _SHORTENED)
    if task == SEQ2SEQ_LM:
        lost += _lost(counts.long_targets, table.num_supervised, table, counts, ("target_cut",))
    total = int(table.lengths.sum(dtype=np.int64)) + lost
    return {"num_tokens_lost": lost, "fraction": lost / total if total else 0.0}


def refuse_losses(
    summary: TokenSummary, *, max_lost_fraction: float, max_positions: int | None, model_name: str
) -> None:
    """Refuse tokens of which the limits have cut too large a part away, before anything is trained on the rest.

    Args:
        summary: as ``write_tokens`` stores it.
        max_lost_fraction: ``tokenize.max_lost_fraction``: largest share of the training rows' tokens that may be lost.
        max_positions: longest row that the model takes; ``None`` where it names none.
        model_name: of the model, for the message.

    Raises:
        UserError: the share that is lost, what lets it pass, and how to lose less.
    """
    train = summary["splits"]["train"]
    losses = train.get("lost_to_limits")
    if not losses or losses["fraction"] <= max_lost_fraction:
        return
    num_lost, fraction = losses["num_tokens_lost"], losses["fraction"]
    limits = [("max_length_tokens", summary["max_length_tokens"], train["too_long"])]
    if "targets_too_long" in train:
        limits.append(("max_target_tokens", summary["max_target_tokens"], train["targets_too_long"]))
    # Name and value of each limit that rows were beyond, how many, and the tokens of the longest.
    passed = [
        (name, limit, beyond["num_rows"], longest)
        for name, limit, beyond in limits
        if (longest := beyond["max_length_tokens"]) is not None
    ]
    named = " and ".join(f"tokenize.{name} = {limit}" for name, limit, _, _ in passed)
    longer = "; ".join(
        f"{count_of(num_rows, 'row')} beyond tokenize.{name}, the longest with {longest:,} tokens"
        for name, _, num_rows, longest in passed
    )
    ways = [
        advise_limit(name, longest, present=limit, max_positions=max_positions) for name, limit, _, longest in passed
    ]
    takes = "" if max_positions is None else f" {model_name} takes at most {max_positions:,} tokens."
    raise UserError(
        f"{named} cut{'s' * (len(passed) == 1)} {fraction:.1%} of the tokens of the training rows away "
        f"({num_lost:,} of {train['num_tokens'] + num_lost:,}), and tokenize.max_lost_fraction = {max_lost_fraction:g} "
        f"lets {max_lost_fraction:.1%} pass: of {count_of(train['num_rows_read'], 'training row')} {longer}.{takes} "
        f"Fix: {'; '.join(ways)}; or set tokenize.max_lost_fraction = 1 to train on what is left."
    )


def advise_limit(name: str, longest: int, *, present: int, max_positions: int | None) -> str:
    """Describe which limit keeps more of the rows, as far as the model goes.

    Args:
        name: ``max_length_tokens`` or ``max_target_tokens``.
        longest: tokens of the longest row.
        present: the limit as it is.
        max_positions: longest row that the model takes; ``None`` where it names none.
    """
    if max_positions is None or longest <= max_positions:
        return f"tokenize.{name} = {longest} would hold every row, if memory allows"
    apart = "shorten or split the longer rows, or take a model for longer ones"
    if present >= max_positions:
        return apart
    return f"raise tokenize.{name} to {max_positions} at most, which is all that the model takes, and {apart}"


def limits_of(settings: TokenizeParameters, *, task: str) -> dict[str, int]:
    """Return the limits that hold for the rows of a task, in tokens by name.

    Args:
        settings: the ``tokenize`` parameters.
        task: the ``task`` parameter.
    """
    limits = {"max_length_tokens": settings.max_length_tokens}
    return limits | ({"max_target_tokens": settings.max_target_tokens} if task == SEQ2SEQ_LM else {})


def describe_limits(settings: TokenizeParameters, *, task: str) -> str:
    """Name the limits as a user writes them.

    Args:
        settings: the ``tokenize`` parameters.
        task: the ``task`` parameter.
    """
    return " and ".join(f"tokenize.{name} = {limit}" for name, limit in limits_of(settings, task=task).items())


def find_lost_splits(
    counts: Mapping[str, SplitCounts],
    written: Mapping[str, TokenTable],
    positions: RowPositions,
    settings: TokenizeParameters,
    *,
    task: str,
    max_positions: int | None = None,
) -> list[str]:
    """Name the splits all of whose rows are lost, where a limit on length has taken some of them.

    Args:
        counts: what happened to the rows, by split.
        written: the rows that are left, by split.
        positions: where rows stand in their files.
        settings: the ``tokenize`` parameters.
        task: the ``task`` parameter.
        max_positions: longest row that the model takes; ``None`` where it names none.

    Returns:
        A sentence for each: the limit, the rows by reason, the shortest of them, and how to keep them.
    """
    problems = []
    for split, of_split in counts.items():
        lost = {
            name: beyond.shortest
            for name, beyond, reasons in (
                ("max_length_tokens", of_split.long_rows, _LOST_TO_LENGTH),
                ("max_target_tokens", of_split.long_targets, _LOST_TO_TARGET),
            )
            if beyond.shortest and any(of_split.counts[reason] for reason in reasons)
        }
        if len(written[split]) or not lost or settings.truncation == "error":
            continue
        ways, sizes = [], []
        for name, shortest in lost.items():
            what = "target" if name == "max_target_tokens" else "row"
            sizes.append(f"the shortest {what} beyond tokenize.{name} has {count_of(shortest, 'token')}")
            if max_positions is None or shortest <= max_positions:
                ways.append(f"raise tokenize.{name} to {shortest} or more")
        if settings.truncation not in CUTTING:
            ways.append("set tokenize.truncation to truncate_prompt or truncate_end")
        ways.append("shorten these rows")
        if split != "train":
            ways.append(f"hold out other rows, or none (split.{split} = 0, data.{split}_path = null)")
        article = {"train": "No training row"}.get(split, f"No {split} row")
        problems.append(
            f"{article} is left after tokenizing with {describe_limits(settings, task=task)}. Read: "
            f"{of_split.num_read:,}. Dropped: {of_split.describe_dropped(positions)}. "
            f"{'; '.join(sizes).capitalize()}. Fix: {'; or '.join(ways)}."
        )
    return problems


def find_lost_classes(
    examples: ExampleTable,
    written: TokenTable,
    label_map: Mapping[str, int] | None,
    settings: TokenizeParameters,
    *,
    task: str,
) -> tuple[list[str], list[str]]:
    """Name the classes that have training rows, all of which tokenizing dropped.

    Args:
        examples: the training rows.
        written: those that are left.
        label_map: id by name of the classes.
        settings: the ``tokenize`` parameters.
        task: the ``task`` parameter: of a classification alone.

    Returns:
        Problems, where no two classes are left, and warnings, where some are.
    """
    if task != SEQUENCE_CLASSIFICATION or not label_map or not len(written) or settings.truncation == "error":
        return [], []
    before = count_classes(examples)
    after = np.bincount(written.labels, minlength=len(label_map))  # (classes,)
    lost = {name: before[name] for name, position in label_map.items() if before[name] and not after[position]}
    if not lost:
        return [], []
    named = [f"{shorten(name)!r} ({count_of(count, 'row')})" for name, count in lost.items()]
    said = (
        f"Classes all of whose training rows are dropped in tokenizing (tokenize.max_length_tokens = "
        f"{settings.max_length_tokens}, tokenize.truncation = {settings.truncation}): "
        f"{name_first(named, _MAX_NAMED)}."
    )
    fix = "Fix: raise tokenize.max_length_tokens, or set tokenize.truncation to truncate_prompt or truncate_end."
    left = [name for name, position in label_map.items() if after[position]]
    if len(left) > 1:
        return [], [f"{said} They are never learned. {fix}"]
    num_rows = count_of(len(written), "row")
    return [f"{said} Only one class is left in train: {shorten(left[0], 100)!r} ({num_rows}). {fix}"], []


def _lost(
    beyond: LongRows, lengths: Int32Array, table: TokenTable, counts: SplitCounts, reasons: tuple[str, ...]
) -> int:
    """Return the tokens of the rows beyond a limit, without those that are left of them."""
    # A row may be noted under several reasons, and counts once.
    shortened = np.fromiter({row_id for reason in reasons for row_id in counts.rows(reason)}, dtype=np.int64)
    left = int(lengths[np.isin(table.row_ids, shortened)].sum(dtype=np.int64))
    return beyond.num_tokens - left


def find_errors(counts: dict[str, SplitCounts], positions: RowPositions, settings: TokenizeParameters) -> list[str]:
    """Return one sentence for each kind of rows that must not be there, by the parameters."""
    is_altered = settings.on_altered_content == "error"
    errors = {
        TOO_LONG: (
            settings.truncation == "error",
            f"longer than tokenize.max_length_tokens = {settings.max_length_tokens}",
            "Raise the limit, or set tokenize.truncation to truncate_prompt, truncate_end or drop.",
        ),
        TARGET_TOO_LONG: (
            settings.truncation == "error",
            f"with a target longer than tokenize.max_target_tokens = {settings.max_target_tokens}",
            "Raise the limit, or set tokenize.truncation to truncate_end or drop.",
        ),
        **{
            reason: (is_altered, f"{what}, while tokenize.on_altered_content is error", advice)
            for reason, (what, advice) in ALTERED.items()
        },
        TYPED: (
            settings.control_tokens == "error",
            "with a control token typed in them, while tokenize.control_tokens is error",
            "Change those rows, or set tokenize.control_tokens to auto, as_text, keep or drop.",
        ),
    }
    return [
        f"{split} rows {what}: {counts[split].describe(reason, positions, num_named=_NUM_ROWS_NAMED)}. {advice}"
        for reason, (is_error, what, advice) in errors.items()
        for split in SPLITS
        if is_error and counts[split].counts[reason]
    ]
