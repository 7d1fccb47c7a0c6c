"""Read a token table once for the checks of its rows; needs no model, no forward pass and no torch.

The lengths of stored rows are checked against the model's positions before its weights are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lm_tuning.data.records import SPLITS
from lm_tuning.errors import UserError
from lm_tuning.models.record import ModelLocation, location_of
from lm_tuning.text.records import NO_LABEL
from lm_tuning.text.store.table import TokenTable, open_split
from lm_tuning.wording import count_of, name_first, noun_for

SHOWN_ROWS = 5

BoolArray: TypeAlias = npt.NDArray[np.bool_]


@dataclass
class SeenRows:
    """What was read of a table.

    Attributes:
        smallest_id: of all rows; 0 at most.
        largest_id: of all rows; 0 at least.
        num_rows: rows that BOS and ends were looked for in.
        num_doubled_bos: of them, rows that begin with two BOS.
        num_taught_ends: of them, rows with a supervised EOS token.
        contradictions: what the columns of the table say against each other, with the first rows.
    """

    smallest_id: int = 0
    largest_id: int = 0
    num_rows: int = 0
    num_doubled_bos: int = 0
    num_taught_ends: int = 0
    contradictions: list[str] = field(default_factory=list)


def read_rows(table: TokenTable, *, bos_id: int | None, end_ids: set[int], task: str, tokens_checked: int) -> SeenRows:
    """Go over a table.

    Args:
        table: tokenized rows.
        bos_id: the tokenizer's BOS; ``None`` for none.
        end_ids: tokens that may end a turn.
        task: ``causal_lm``, ``sequence_classification`` or ``seq2seq_lm``.
        tokens_checked: tokens among which BOS and ends are looked for, evenly spread over a larger table.
    """
    seen = SeenRows()
    wrong: dict[str, list[int]] = {}
    for batch in table.batches():
        if not batch.num_rows:
            continue
        ids, starts, stops = _parts(batch.column("input_ids"))
        # A batch is a view of a larger buffer: the values before its first row and after its last are other batches'.
        used = ids[starts[0] : stops[-1]]
        if len(used):
            seen.smallest_id = min(seen.smallest_id, int(used.min()))
            seen.largest_id = max(seen.largest_id, int(used.max()))
        # What is named is the id of the row in the data, not its index in the table.
        row_ids = batch.column("row_id").to_numpy()
        for what, is_wrong in _contradictions(batch, task).items():
            wrong.setdefault(what, []).extend(row_ids[is_wrong].tolist())
    seen.contradictions = [f"{what} ({name_rows(rows)})" for what, rows in wrong.items() if rows]
    if not seen.contradictions:  # spans that point outside their rows cannot be followed
        for batch in _spread_batches(table, tokens_checked):
            _look_at_ends(seen, batch, bos_id, np.fromiter(end_ids, dtype=np.int64))
    return seen


def find_rows_with(table: TokenTable, low: int, high: int) -> list[int]:
    """Return the row ids of rows that hold a token id below ``low`` or from ``high`` on."""
    found: list[int] = []
    for batch in table.batches():
        ids, starts, stops = _parts(batch.column("input_ids"))
        is_outside = (ids < low) | (ids >= high)
        # (tokens + 1,): how many ids lie outside before each token, so that a row's count is one difference.
        counts = np.concatenate([[0], np.cumsum(is_outside)])
        has_outside = counts[stops] > counts[starts]
        found += batch.column("row_id").to_numpy()[has_outside].tolist()
    return found


def find_outside_ids(table: TokenTable, low: int, high: int) -> list[int]:
    """Return the different token ids of a table that are below ``low`` or from ``high`` on."""
    found: set[int] = set()
    for batch in table.batches():
        ids, starts, stops = _parts(batch.column("input_ids"))
        used = ids[starts[0] : stops[-1]] if batch.num_rows else ids[:0]
        found.update(np.unique(used[(used < low) | (used >= high)]).tolist())
    return sorted(found)


def name_rows(row_ids: list[int]) -> str:
    """Name rows by their ids, as the data reports number them."""
    return f"{noun_for(len(row_ids), 'row')} {name_first(row_ids, SHOWN_ROWS)}"


def _contradictions(batch: Any, task: str) -> dict[str, BoolArray]:
    """Compare the columns of a batch; return by description which rows are wrong, ``(rows,)`` booleans."""
    _, starts, stops = _parts(batch.column("input_ids"))
    spans, span_starts, span_stops = _parts(batch.column("spans"))
    # (rows,) each
    lengths = batch.column("length").to_numpy()
    labels = batch.column("label").to_numpy()
    supervised = batch.column("num_supervised").to_numpy()
    found: dict[str, BoolArray] = {"the column of lengths does not count the tokens": lengths != stops - starts}
    is_odd = (span_stops - span_starts) % 2 == 1
    found["spans have a start without an end"] = is_odd
    if is_odd.any() or (span_starts % 2).any():
        return found
    # (spans, 2): start and end of each, in tokens of its row.
    pairs = spans[: len(spans) // 2 * 2].reshape(-1, 2).astype(np.int64)
    first, last = span_starts // 2, span_stops // 2
    # (spans,): a flat list knows its rows by their offsets alone.
    row_of_pair = np.repeat(np.arange(len(first)), last - first)
    used = pairs[first[0] : last[-1]]
    # A span from token 0 would have its first token predicted by nothing.
    is_bad = (used[:, 0] < 1) | (used[:, 1] <= used[:, 0]) | (used[:, 1] > (stops - starts)[row_of_pair])
    # Spans of a row must ascend; the first one of each row has none before it.
    follows = np.zeros(len(used), dtype=bool)
    follows[1:] = (row_of_pair[1:] == row_of_pair[:-1]) & (used[1:, 0] < used[:-1, 1])
    num_misplaced = np.bincount(row_of_pair[is_bad | follows], minlength=len(first))  # (rows,)
    found["spans lie outside their row or overlap"] = num_misplaced > 0
    # (rows,): tokens in spans; a class counts as one, since a row has either.
    covered = np.bincount(row_of_pair, weights=used[:, 1] - used[:, 0], minlength=len(first))
    found["the column of supervised tokens does not count the spans"] = supervised != covered + (labels != NO_LABEL)
    if task == "seq2seq_lm":
        ends = np.zeros(len(first), dtype=np.int64)
        ends[row_of_pair] = used[:, 1]
        has_target = last > first
        found["the target does not end the row, or is not one span"] = has_target & (
            (last - first != 1) | (ends != stops - starts)
        )
    return found


def _look_at_ends(seen: SeenRows, batch: Any, bos_id: int | None, ends: Any) -> None:
    """Count rows with two BOS and rows whose end is supervised."""
    ids, starts, stops = _parts(batch.column("input_ids"))
    spans, span_starts, span_stops = _parts(batch.column("spans"))
    seen.num_rows += len(starts)
    if bos_id is not None:
        first = starts[stops - starts >= 2]
        seen.num_doubled_bos += int(((ids[first] == bos_id) & (ids[first + 1] == bos_id)).sum())
    # (rows,) booleans, then one entry per row that has spans, of its last span.
    with_spans = span_stops > span_starts
    span_ends = spans[span_stops[with_spans] - 1]
    last_spans = spans[span_stops[with_spans] - 2]
    row_starts = starts[with_spans]
    is_end = np.isin(ids[row_starts + span_ends - 1], ends)
    # A newline may follow the end of a turn inside the same span.
    longer = span_ends - 2 >= last_spans
    is_end[longer] |= np.isin(ids[row_starts[longer] + span_ends[longer] - 2], ends)
    seen.num_taught_ends += int(is_end.sum())


def _spread_batches(table: TokenTable, num_tokens: int) -> Iterator[Any]:
    # Whole batches are left out, not rows: what is not read costs nothing.
    stride = max(1, -(-int(table.lengths.sum(dtype=np.int64)) // num_tokens))
    return (batch for batch in islice(table.batches(), 0, None, stride) if batch.num_rows)


def _parts(column: Any) -> tuple[Any, Any, Any]:
    """Return the flat values of a list column, and where each row starts and stops in them."""
    offsets = column.offsets.to_numpy()
    return column.values.to_numpy(), offsets[:-1], offsets[1:]


@dataclass(frozen=True)
class LongRows:
    """Rows of one split that are longer than a model has positions.

    Attributes:
        split: its name.
        key: the parameter that limits their length.
        num_long: how many they are.
        num_rows: rows of the split.
        longest_tokens: tokens of the longest; of the source or the target alone for ``seq2seq_lm``.
    """

    split: str
    key: str
    num_long: int
    num_rows: int
    longest_tokens: int

    def describe(self) -> str:
        """Return how many they are and how long the longest is."""
        part = {"tokenize.max_target_tokens": "target"}.get(self.key, "row")
        return (
            f"{self.num_long} of {count_of(self.num_rows, part)} of the {self.split} split, the longest with "
            f"{self.longest_tokens} tokens"
        )


def find_long_rows(tokens_folder: Path, limit: int, *, task: str) -> list[LongRows]:
    """Look for rows that are longer than a model has positions.

    Args:
        tokens_folder: a folder of tokenized splits.
        limit: positions of the model.
        task: ``seq2seq_lm`` looks at sources and targets apart, since encoder and decoder count their own positions.

    Returns:
        One entry for each split and limiting parameter, the training split first.
    """
    found = []
    for split in SPLITS:
        table = open_split(tokens_folder, split)
        parts = {"tokenize.max_length_tokens": table.lengths}
        if task == "seq2seq_lm":
            parts = {
                "tokenize.max_length_tokens": table.lengths - table.num_supervised,
                "tokenize.max_target_tokens": table.num_supervised,
            }
        for key, lengths in parts.items():
            num_long = int((lengths > limit).sum())
            if num_long:
                found.append(LongRows(split, key, num_long, len(table), int(lengths.max())))
    return found


def refuse_long_rows(
    tokens_folder: Path, base: ModelLocation, *, task: str, label_map: dict[str, int] | None, limits: dict[str, Any]
) -> None:
    """Refuse rows for which a model has no positions; models that compute their positions are left to the findings.

    Args:
        tokens_folder: a folder of tokenized splits.
        base: what is tuned: ``name_or_path``, ``revision`` and ``trust_remote_code``.
        task: as for :func:`lm_tuning.models.loading.load_model`.
        label_map: likewise.
        limits: the ``tokenize`` parameters that the rows were made with, for the message; may be empty.

    Raises:
        UserError: naming parameter, value and positions for each kind of row.
    """
    from lm_tuning.models.loading import build_skeleton, check_model
    from lm_tuning.models.structure import find_positions, position_limit

    where = location_of(base)
    limit = position_limit(check_model(**where, task=task))
    long_rows = find_long_rows(tokens_folder, limit, task=task) if limit else []
    if not long_rows:
        return
    positions = find_positions(build_skeleton(**where, task=task, label_map=label_map))
    if positions is None or not positions.are_learned:
        return
    problems = []
    for key in dict.fromkeys(rows.key for rows in long_rows):
        value = limits.get(key.partition(".")[2])
        given = key if value is None else f"{key} = {value}"
        rows_of_key = "; ".join(rows.describe() for rows in long_rows if rows.key == key)
        problems.append(
            f"{given} lets rows be longer than the {limit} positions of {base['name_or_path']}, which has no "
            f"weights for later ones: {rows_of_key}. Set {key} to {limit} or less."
        )
    raise UserError(problems)
