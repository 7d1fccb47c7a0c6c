"""Count what happens to the rows of a split while they become tokens, and remember which rows they were."""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Iterable

import numpy as np

from lm_tuning.data.check.findings import RowPositions
from lm_tuning.text.records import BeyondLimit
from lm_tuning.text.store.columns import BoolArray
from lm_tuning.text.store.table import Int64Array
from lm_tuning.wording import noun_for

logger = logging.getLogger(__name__)

DROPPED = {
    "no_assistant_turn": "no assistant turn that is supervised",
    "refused_by_template": "refused by the chat template",
    "untraceable": "the answer cannot be told apart in the rendered text",
    "too_long": "longer than tokenize.max_length_tokens",
    "target_too_long": "target longer than tokenize.max_target_tokens",
    "no_answer_left": "no supervised token within tokenize.max_length_tokens",
    "no_text_left": "no token of the text within tokenize.max_length_tokens",
    "no_target_left": "no token of the target within tokenize.max_target_tokens",
    "control_token": "a control token is typed in it, see tokenize.control_tokens",
    "control_token_unspellable": "a control token is typed in it that the tokenizer cannot write as letters",
    "tool_arguments_not_json": "a tool call has arguments that are no JSON object, which the chat template needs",
}
"""Why rows are left out, by reason."""

UNUSABLE = (
    "no_assistant_turn",
    "refused_by_template",
    "untraceable",
    "control_token_unspellable",
    "tool_arguments_not_json",
)
"""Reasons that make a row a bad one, for which ``data.on_bad_row`` is there; others follow from a limit or a choice."""

CHANGED = {
    "trailing_turns_cut": "turns after the last supervised answer cut",
    "answer_of_weight_0": "an answer of weight 0 is not supervised",
    "answer_not_learned": "an earlier answer is not supervised, since the chat template rewrites it",
    "old_turns_dropped": "oldest exchanges left out to fit",
    "prompt_shortened": "part of the prompt cut to fit",
    "prompt_emptied": "nothing left of a prompt, or of one of its columns or turns, to fit",
    "answer_shortened": "end of the answer cut, since it does not fit even alone",
    "end_cut": "end cut to fit",
    "text_shortened": "part of the text cut to fit",
    "source_cut": "part of the source cut to fit tokenize.max_length_tokens",
    "target_cut": "end of the target cut to fit tokenize.max_target_tokens",
    "tools_left_out": "the chat template does not show the tools that the row offers or calls, or not whole",
    "turn_left_out": "the chat template leaves a turn out, such as the system turn",
    "reasoning_left_out": "the chat template does not show the reasoning of an answer",
    "earlier_answer_shortened": "the chat template leaves a part of an earlier answer out, such as its reasoning, but "
    "shows it in the last one",
    "content_not_verbatim": "the chat template changes the content (for example trims it)",
    "not_round_trip": "the tokenizer cannot give the text back exactly",
    "control_token_as_text": "a control token is typed in it and learned as letters",
    "control_token_kept": "a control token is typed in it and kept",
}

SHORTENED = frozenset({"prompt_shortened", "text_shortened", "source_cut", "end_cut", "old_turns_dropped"})
"""What a limit is there for, as long as it happens to few rows."""

NUM_DETAILS = 1000
"""Rows of a reason whose details are kept."""

_NUM_ROWS_NAMED = 5
_FEW_ROWS = 0.01
"""Share of rows that may be longer than a sensible limit."""


class LongRows:
    """Remember how long rows were that are longer than a limit, before anything was cut.

    Attributes:
        shortest: tokens of the shortest of them; 0 where there is none.
        num_tokens: tokens of all of them.
    """

    def __init__(self) -> None:
        """Start without long rows."""
        self._num_long = 0
        self._longest = 0
        self.shortest = 0
        self.num_tokens = 0
        self._tokens_over_limit = 0
        self._rows_over: Counter[int] = Counter()
        self._tokens_over: Counter[int] = Counter()

    def add(self, lengths: Int64Array, *, limit: int) -> None:
        """Count some long rows.

        Args:
            lengths: in tokens, each above the limit.
            limit: tokens that a row may have.
        """
        if not len(lengths):
            return
        self._num_long += len(lengths)
        self._longest = max(self._longest, int(lengths.max()))
        self.shortest = min(self.shortest or int(lengths.min()), int(lengths.min()))
        self.num_tokens += int(lengths.sum())
        self._tokens_over_limit += int((lengths - limit).sum())
        # The next power of two above the limit, and those after it up to the longest row.
        power = 1 << limit.bit_length()
        while power < self._longest:
            over = lengths[lengths > power] - power
            self._rows_over[power] += len(over)
            self._tokens_over[power] += int(over.sum())
            power *= 2

    def describe(self) -> BeyondLimit:
        """Return what the limit cuts, and what a higher one would: rows and tokens beyond powers of two."""
        powers = sorted(power for power, rows in self._rows_over.items() if rows)
        return {
            "num_rows": self._num_long,
            "max_length_tokens": self._longest or None,
            "tokens_over_limit": self._tokens_over_limit,
            "rows_over": {str(power): self._rows_over[power] for power in powers},
            "tokens_over": {str(power): self._tokens_over[power] for power in powers},
        }


class SplitCounts:
    """Count what happens to the rows of one split.

    Attributes:
        num_read: rows looked at.
        counts: rows by reason; keys of ``DROPPED`` and ``CHANGED``.
        endings: how often each id ends an answer that was not cut.
        long_rows: rows beyond ``tokenize.max_length_tokens``.
        long_targets: rows whose target is beyond ``tokenize.max_target_tokens``.
    """

    def __init__(self) -> None:
        """Start without rows."""
        self.num_read = 0
        self.counts: Counter[str] = Counter()
        self.endings: Counter[int] = Counter()
        self._rows: dict[str, array[int]] = {}
        self._details: dict[str, dict[int, str]] = {}
        self.long_rows = LongRows()
        self.long_targets = LongRows()

    def add(self, reason: str, row_id: int, detail: str = "") -> None:
        """Count one row.

        Args:
            reason: key of ``DROPPED`` or ``CHANGED``.
            row_id: the row.
            detail: what happened; those of the first rows are kept.
        """
        # Ids cost eight bytes each, so all are kept; details are text, so only the first are.
        self.counts[reason] += 1
        self._rows.setdefault(reason, array("q")).append(row_id)
        if detail:
            details = self._details.setdefault(reason, {})
            if len(details) < NUM_DETAILS:
                details[row_id] = detail

    def add_rows(self, reason: str, row_ids: Int64Array) -> None:
        """Count some rows.

        Args:
            reason: key of ``DROPPED`` or ``CHANGED``.
            row_ids: the rows.
        """
        if len(row_ids):
            self.counts[reason] += len(row_ids)
            self._rows.setdefault(reason, array("q")).extend(row_ids.tolist())

    def rows(self, reason: str) -> array[int]:
        """Return the ids of all rows of a reason, ascending.

        Args:
            reason: key of ``DROPPED`` or ``CHANGED``.
        """
        return array("q", sorted(self._rows.get(reason, ())))

    def detail(self, reason: str, row_id: int) -> str:
        """Return what was said of a row; empty where nothing was kept.

        Args:
            reason: key of ``DROPPED`` or ``CHANGED``.
            row_id: the row.
        """
        return self._details.get(reason, {}).get(row_id, "")

    def by_detail(self, reason: str) -> dict[str, array[int]]:
        """Return the rows of a reason by what was said of them, in order; rows beyond ``NUM_DETAILS`` have no detail.

        Args:
            reason: key of ``DROPPED`` or ``CHANGED``.
        """
        details = self._details.get(reason, {})
        found: dict[str, array[int]] = {}
        for row_id in self.rows(reason):
            found.setdefault(details.get(row_id, ""), array("q")).append(row_id)
        return found

    def describe_dropped(self, positions: RowPositions) -> str:
        """Write the counts of all rows that were left out; empty without any.

        Args:
            positions: where rows stand in their files.
        """
        return "; ".join(self.describe(reason, positions) for reason in DROPPED if self.counts[reason])

    def describe(self, reason: str, positions: RowPositions, *, num_named: int = _NUM_ROWS_NAMED) -> str:
        """Write one count in words, with the first rows.

        Args:
            reason: key of ``DROPPED`` or ``CHANGED``.
            positions: where rows stand in their files.
            num_named: rows that are named.
        """
        rows = self.rows(reason)
        details = self._details.get(reason)
        detail = f": {details[min(details)]}" if details else ""
        named = name_rows(rows, positions, num_named=num_named)
        return f"{len(rows):,} ({(DROPPED | CHANGED)[reason]}; {named}){detail}"

    def warn(self, split: str, positions: RowPositions) -> None:
        """Log every count that is not zero; a few rows that a limit shortens are to be expected, and no warning.

        Args:
            split: name of the split.
            positions: where rows stand in their files.
        """
        for title, reasons in (("dropped", DROPPED), ("changed", CHANGED)):
            for reason in reasons:
                if self.counts[reason]:
                    is_ordinary = reason in SHORTENED and self.counts[reason] < _FEW_ROWS * self.num_read
                    level = logging.INFO if is_ordinary else logging.WARNING
                    logger.log(level, "%s rows %s: %s", split, title, self.describe(reason, positions))


class KeptRows:
    """The rows of a chunk that are still kept: one that leaves them is counted under its reason.

    Attributes:
        mask: which rows are kept, ``(rows,)``.
        counts: what happens to the rows of the split.
    """

    def __init__(self, row_ids: Int64Array, counts: SplitCounts, mask: BoolArray | None = None) -> None:
        """Begin with all rows, or with some.

        Args:
            row_ids: identity of each row, ``(rows,)``.
            counts: receives what happens to them.
            mask: which rows to begin with, ``(rows,)``; ``None`` for all.
        """
        self.mask: BoolArray = np.ones(len(row_ids), dtype=np.bool_) if mask is None else mask
        self.counts = counts
        self._row_ids = row_ids

    def drop(self, reason: str, rows: BoolArray) -> None:
        """Leave rows out.

        Args:
            reason: key of ``DROPPED``.
            rows: which, ``(rows,)``; those that are out already are not counted again.
        """
        self.note(reason, rows)
        self.mask = self.mask & ~rows

    def note(self, reason: str, rows: BoolArray) -> None:
        """Count what happened to rows that are kept.

        Args:
            reason: key of ``CHANGED``.
            rows: which, ``(rows,)``.
        """
        self.counts.add_rows(reason, self._row_ids[self.mask & rows])

    def note_each(self, notes: Iterable[Iterable[str]]) -> None:
        """Count what was noted of each row, if it is kept.

        Args:
            notes: keys of ``CHANGED``, for each row.
        """
        for position, of_row in enumerate(notes):
            for note in of_row:
                self.count(note, position)

    def count(self, reason: str, position: int, detail: str = "") -> None:
        """Count what happened to one row, if it is kept.

        Args:
            reason: key of ``DROPPED``, which leaves the row out, or of ``CHANGED``.
            position: of the row.
            detail: what happened, in words.
        """
        if self.mask[position]:
            self.counts.add(reason, int(self._row_ids[position]), detail)
            self.mask[position] = reason not in DROPPED


def name_rows(row_ids: array[int], positions: RowPositions, *, num_named: int) -> str:
    """Name the first of some rows, each file once.

    Args:
        row_ids: ascending.
        positions: where rows stand in their files.
        num_named: rows that are named.
    """
    named = []
    for path, numbers in positions.by_file(row_ids[:num_named]):
        named.append(f"{path}, {noun_for(len(numbers), 'row')} {', '.join(map(str, numbers))}")
    return "; ".join(named) + (", ..." if len(row_ids) > num_named else "")
