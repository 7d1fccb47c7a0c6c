"""Work on the tokens of many rows as columns: no object a row, so that millions of them cost little."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lm_tuning.text.store.table import Int32Array, Int64Array, TokenColumns

BoolArray = npt.NDArray[np.bool_]


def take_rows(columns: TokenColumns, order: Int64Array) -> TokenColumns:
    """Reorder rows, or leave some out.

    Args:
        columns: the rows.
        order: indices of the rows wanted.
    """
    ids, id_offsets = _take(columns.ids, columns.id_offsets, order)
    spans, span_offsets = _take(columns.spans, columns.span_offsets, order)
    labels = None if columns.labels is None else columns.labels[order]
    return TokenColumns(columns.row_ids[order], columns.sources[order], ids, id_offsets, spans, span_offsets, labels)


def keep_rows(columns: TokenColumns, mask: BoolArray) -> TokenColumns:
    """Leave rows out.

    Args:
        columns: the rows.
        mask: which stay, ``(rows,)``.
    """
    return columns if mask.all() else take_rows(columns, np.flatnonzero(mask))


def join_columns(first: TokenColumns, second: TokenColumns) -> TokenColumns:
    """Append the rows of one table to those of another.

    Args:
        first: some rows.
        second: the others, with classes if the first have them.
    """
    labels = None
    if first.labels is not None and second.labels is not None:
        labels = np.concatenate([first.labels, second.labels])
    assert labels is not None or first.labels is second.labels, "only some of the rows have classes"
    return TokenColumns(
        np.concatenate([first.row_ids, second.row_ids]),
        np.concatenate([first.sources, second.sources]),
        np.concatenate([first.ids, second.ids]),
        np.concatenate([first.id_offsets, second.id_offsets[1:] + first.id_offsets[-1]]),
        np.concatenate([first.spans, second.spans]),
        np.concatenate([first.span_offsets, second.span_offsets[1:] + first.span_offsets[-1]]),
        labels,
    )


def join_sides(
    ids: Int32Array, offsets: Int64Array, other_ids: Int32Array, other_offsets: Int64Array
) -> tuple[Int32Array, Int64Array]:
    """Join the tokens of a second text of each row behind those of the first.

    Args:
        ids: token ids of all first texts end to end.
        offsets: ``(rows + 1,)``: where each first text starts in them.
        other_ids: of all second texts.
        other_offsets: where each of those starts.

    Returns:
        Ids and offsets of the rows.
    """
    joined = np.empty(len(ids) + len(other_ids), dtype=np.int32)
    # (rows + 1,): where each joined row starts
    moved = offsets + other_offsets
    for values, starts, positions in (
        (ids, offsets, moved[:-1]),
        (other_ids, other_offsets, moved[:-1] + np.diff(offsets)),
    ):
        # (values,): each keeps its order, shifted by as much as its row has moved
        joined[np.arange(len(values)) + np.repeat(positions - starts[:-1], np.diff(starts))] = values
    return joined, moved


def put_around(
    ids: Int32Array,
    offsets: Int64Array,
    *,
    before: list[int],
    has_before: BoolArray,
    after: int | None = None,
    is_open: BoolArray | None = None,
) -> tuple[Int32Array, Int64Array]:
    """Add ids before some rows, and one behind those that do not end with it.

    Args:
        ids: token ids of all rows end to end.
        offsets: where each row starts, the end included.
        before: what goes before a row.
        has_before: ``(rows,)``: which rows get that.
        after: what rows end with; ``None`` for nothing.
        is_open: ``(rows,)``: which rows may get that; ``None`` for all.

    Returns:
        Ids and offsets.
    """
    has_after = np.zeros_like(has_before) if after is None else ~ends_with(ids, offsets, after)
    if is_open is not None:
        has_after &= is_open
    if not has_after.any() and not (before and has_before.any()):
        return ids, offsets
    lengths = np.diff(offsets)
    # (rows,): ids that each row gets in front
    leads = len(before) * has_before
    moved = np.concatenate([[0], np.cumsum(lengths + leads + has_after)])
    everything = np.empty(int(moved[-1]), dtype=np.int32)
    # (tokens,): a scatter of all rows at once, then of what is put around them
    everything[np.arange(len(ids)) + np.repeat(moved[:-1] + leads - offsets[:-1], lengths)] = ids
    for position, token in enumerate(before):
        everything[moved[:-1][has_before] + position] = token
    if after is not None:
        everything[moved[1:][has_after] - 1] = after
    return everything, moved


def cut_ends(ids: Int32Array, offsets: Int64Array, limit: int | Int64Array) -> tuple[Int32Array, Int64Array]:
    """Keep the first tokens of every row.

    Args:
        ids: token ids of all rows end to end.
        offsets: where each row starts, the end included.
        limit: tokens that a row may keep, for all rows or ``(rows,)``.

    Returns:
        Ids and offsets.
    """
    lengths = np.diff(offsets)
    limits = np.broadcast_to(limit, lengths.shape)
    # (tokens,): position in the row, below the limit of the row
    kept = np.arange(len(ids)) - np.repeat(offsets[:-1], lengths) < np.repeat(limits, lengths)
    return ids[kept], np.concatenate([[0], np.cumsum(np.minimum(lengths, limits))])


def begins_with(ids: Int32Array, offsets: Int64Array, prefix: list[int]) -> BoolArray:
    """Return which rows begin with some ids.

    Args:
        ids: token ids of all rows end to end.
        offsets: where each row starts, the end included.
        prefix: the ids.
    """
    begins: BoolArray = np.diff(offsets) >= len(prefix)
    starts = offsets[:-1][begins]
    same = np.ones(len(starts), dtype=np.bool_)
    for position, token in enumerate(prefix):
        same &= ids[starts + position] == token
    # Only rows that are long enough were looked at; the others stay False.
    begins[begins] = same
    return begins


def ends_with(ids: Int32Array, offsets: Int64Array, token: int) -> BoolArray:
    """Return which rows end with an id.

    Args:
        ids: token ids of all rows end to end.
        offsets: where each row starts, the end included.
        token: the id.
    """
    ends: BoolArray = np.diff(offsets) > 0
    ends[ends] = ids[offsets[1:][ends] - 1] == token
    return ends


def count_token(ids: Int32Array, offsets: Int32Array | Int64Array, token: int) -> Int64Array:
    """Count an id in each row, ``(rows,)``.

    Args:
        ids: token ids of all rows end to end.
        offsets: where each row starts, the end included.
        token: the id.
    """
    # Differences of running counts at the edges of the rows, so a row without tokens counts none.
    return np.diff(np.concatenate([[0], np.cumsum(ids == token)])[offsets])


def hold_token(ids: Int32Array, offsets: Int32Array | Int64Array, token: int) -> BoolArray:
    """Return which rows hold an id anywhere.

    Args:
        ids: token ids of all rows end to end.
        offsets: where each row starts, the end included.
        token: the id.
    """
    found: BoolArray = count_token(ids, offsets, token) > 0
    return found


def score_spans(
    rows: Int64Array, starts: Int64Array, ends: Int64Array, lengths: Int64Array
) -> tuple[Int32Array, Int64Array]:
    """Cut spans to the positions that a causal model can be scored on: ``scored_spans`` for many rows.

    Args:
        rows: row of each span, ``(spans,)``, ascending.
        starts: first token of each span, ascending and disjoint within a row.
        ends: the token behind it.
        lengths: tokens of each row, ``(rows,)``.

    Returns:
        Start and end of all spans end to end, and where each row starts in that, the end included.
    """
    starts = np.maximum(starts, 1)
    ends = np.minimum(ends, lengths[rows])
    kept = ends > starts
    rows, starts, ends = rows[kept], starts[kept], ends[kept]
    if len(rows):
        # Touching spans of a row become one, so that supervised positions are never counted twice.
        apart = np.concatenate([[True], (rows[1:] != rows[:-1]) | (starts[1:] > ends[:-1])])
        last = np.concatenate([apart[1:], [True]])
        rows, starts, ends = rows[apart], starts[apart], ends[last]
    spans = np.stack([starts, ends], axis=1).astype(np.int32).reshape(-1)
    return spans, np.concatenate([[0], np.cumsum(2 * np.bincount(rows, minlength=len(lengths)))])


def _take(values: Int32Array, offsets: Int64Array, order: Int64Array) -> tuple[Int32Array, Int64Array]:
    lengths = np.diff(offsets)[order]
    moved = np.concatenate([[0], np.cumsum(lengths)])
    return values[np.arange(int(moved[-1])) + np.repeat(offsets[:-1][order] - moved[:-1], lengths)], moved
