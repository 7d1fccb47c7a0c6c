"""Turn labelled texts into token ids and classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lm_tuning.data.check.findings import RowPositions
from lm_tuning.data.format.labels import describe_unknown_classes
from lm_tuning.data.store import ExampleTable
from lm_tuning.errors import UserError
from lm_tuning.parameters.data import TokenizeParameters
from lm_tuning.text.align.masks import added_around
from lm_tuning.text.render.plain import RenderedRows, render_text
from lm_tuning.text.store.columns import begins_with, cut_ends, keep_rows, put_around
from lm_tuning.text.store.table import Int32Array, Int64Array, TokenColumns, flatten_ids
from lm_tuning.text.tokenizers.base import NO_TEXT_LEFT, TaskTokenizer
from lm_tuning.text.tokenizers.counts import KeptRows, SplitCounts
from lm_tuning.text.tokenizers.truncation import END_CUT, TOO_LONG


class ClassTokenizer(TaskTokenizer):
    """Tokenize texts as they are, with what the tokenizer puts before them; the class goes beside, not into, the text.

    No EOS token is added: the class is read off the last token of the text.
    """

    def __init__(self, tokenizer: Any, settings: TokenizeParameters, label_map: Mapping[str, int]) -> None:
        """Keep a tokenizer and the classes.

        Args:
            tokenizer: see ``TaskTokenizer``.
            settings: the ``tokenize`` parameters; the text gives way as a prompt does.
            label_map: id by name of all classes that occur, from 0 without gaps.
        """
        super().__init__(tokenizer, settings)
        self._prefix = added_around(tokenizer)[0]
        names = sorted(label_map, key=label_map.__getitem__)
        assert [label_map[name] for name in names] == [*range(len(names))], "ids of classes have gaps"
        self._names = pa.array(names, type=pa.string())

    def render(self, batch: pa.RecordBatch, counts: SplitCounts) -> RenderedRows:
        """Render the texts, and number the classes."""
        positions, rows = self._render_each(
            batch, ("text",), lambda text: self._look_through(render_text(text)), counts
        )
        labels = pc.index_in(batch.column("label"), value_set=self._names)
        assert not labels.null_count, "refuse_unknown_classes comes first"
        return self._collect(batch, positions, rows, labels=labels.to_numpy()[positions])

    def finish(self, rendered: RenderedRows, encodings: list[Any], counts: SplitCounts) -> TokenColumns:
        """Build what belongs before each text and as many of its tokens as the limit allows."""
        limit = self._settings.max_length_tokens
        rows = KeptRows(rendered.row_ids, counts)
        tokens = self._spell(rendered.rows, encodings, rows)
        ids, offsets, num_added = self._put_before(tokens)
        lengths = np.diff(offsets)  # (rows,)
        is_cut = self._settle_long(lengths, rows, limit=limit, dropped_as=TOO_LONG, noted_in=counts.long_rows)
        rows.drop(NO_TEXT_LEFT, np.minimum(lengths, limit) <= len(self._prefix))
        is_cut &= rows.mask
        if is_cut.any():
            self._shorten_texts(rendered, tokens, limit - num_added, is_cut, counts)
            ids, offsets, _ = self._put_before(tokens)
            ids, offsets = cut_ends(ids, offsets, limit)
        rows.note(END_CUT if self._settings.truncation == "truncate_end" else "text_shortened", is_cut)
        self._count_unknown(ids, offsets, rows)
        rows.note_each(row.notes for row in rendered.rows)
        # The class is all that is supervised, so no row has a span.
        no_spans = np.empty(0, dtype=np.int32), np.zeros(len(tokens) + 1, dtype=np.int64)
        columns = TokenColumns(rendered.row_ids, rendered.sources, ids, offsets, *no_spans, rendered.labels)
        return keep_rows(columns, rows.mask)

    def _put_before(self, tokens: list[list[int]]) -> tuple[Int32Array, Int64Array, Int64Array]:
        """Return ids and offsets of texts with what belongs before each, and how many that adds, ``(rows,)``."""
        ids, offsets = flatten_ids(tokens)
        has_before = ~begins_with(ids, offsets, self._prefix)
        ids, offsets = put_around(ids, offsets, before=self._prefix, has_before=has_before)
        return ids, offsets, len(self._prefix) * has_before


def refuse_unknown_classes(
    tables: Mapping[str, ExampleTable],
    label_map: Mapping[str, int] | None,
    positions: RowPositions,
    *,
    max_rows: int | None = None,
) -> None:
    """Refuse rows of classes that no training row has, before anything is tokenized.

    Args:
        tables: rows by split.
        label_map: id by name of the training rows' classes; ``None`` where there are none.
        positions: where rows stand in their files.
        max_rows: ``data.max_rows``: rows that were read of each file; ``None`` for all.

    Raises:
        UserError: a line for each of these classes (up to 20, those with most rows) with its number of rows and the
            first of them.
    """
    if not label_map:
        raise UserError("task: sequence_classification needs classes, and the stored splits have none.")
    unknown = _find_unknown_classes(tables, pa.array(label_map, type=pa.string()))
    problems = describe_unknown_classes(
        {label: sum(found.num_rows.values()) for label, found in unknown.items()},
        lambda label: (unknown[label].first_row_id, unknown[label].num_rows),
        positions,
        max_rows=max_rows,
    )
    if problems:
        raise UserError(problems)


def count_classes(table: ExampleTable) -> Counter[str]:
    """Count the rows of each class.

    Args:
        table: labelled rows.
    """
    counts: Counter[str] = Counter()
    for batch in table.batches():
        # Counted by Arrow: a Python loop over millions of labels would take minutes.
        for item in pc.value_counts(batch.column("label")).to_pylist():
            counts[item["values"]] += item["counts"]
    return counts


@dataclass
class _UnknownClass:
    """Rows of a class that no training row has: their number by split, and the id of the first."""

    first_row_id: int
    num_rows: dict[str, int] = field(default_factory=dict)


def _find_unknown_classes(tables: Mapping[str, ExampleTable], names: pa.Array) -> dict[str, _UnknownClass]:
    """Count the rows of each class that is none of the names."""
    found: dict[str, _UnknownClass] = {}
    for split, table in tables.items():
        for batch in table.batches():
            labels, row_ids = batch.column("label"), batch.column("row_id")
            for position in pc.indices_nonzero(pc.invert(pc.is_in(labels, value_set=names))).to_pylist():
                one = found.setdefault(labels[position].as_py(), _UnknownClass(row_ids[position].as_py()))
                one.num_rows[split] = one.num_rows.get(split, 0) + 1
    return found
