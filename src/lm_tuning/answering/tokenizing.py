"""Turn prompts into tokens, as training rows were: with a placeholder for the answer, at which each is cut off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import pyarrow as pa

from lm_tuning.answering.wording import Wording
from lm_tuning.data.format.columns import TEXT, ColumnMapping
from lm_tuning.data.format.examples import Example
from lm_tuning.data.store import example_schema
from lm_tuning.text.store.table import TokenColumns
from lm_tuning.text.tokenizers.counts import SplitCounts

BEGINNING_CUT = "prompt_shortened"
"""Count of running text that lost its beginning, as of other prompts that lost a part."""


class TokenizedPrompt(NamedTuple):
    """A prompt as the model reads it.

    Attributes:
        row_id: identity of the row.
        input_ids: token ids, ``(prompt tokens,)``.
        reference_ids: those of the placeholder answer, its end included, ``(answer tokens,)``.
    """

    row_id: int
    input_ids: list[int]
    reference_ids: list[int]


class PromptTokenizer:
    """Tokenizes prompts for one model; a context manager, since it borrows the tokenizer's backend."""

    def __init__(self, tokenizer: Any, wording: Wording, mapping: ColumnMapping) -> None:
        """Compile the chat template, so that one which cannot work is named before any row.

        Args:
            tokenizer: of the tuned model; must not be used elsewhere inside the ``with`` block.
            wording: how prompts are written for it.
            mapping: how they are read, see ``choose_prompt_mapping``.

        Raises:
            UserError: the format needs a chat template, and there is none.
        """
        self._rows = wording.tokenizer_of(tokenizer, mapping.format)
        self._room = wording.room
        self._is_text = mapping.format == TEXT
        self._is_composed = mapping.is_composed
        self._schema = example_schema(mapping.format, is_composed=mapping.is_composed)
        self._begin_id: int | None = tokenizer.bos_token_id
        self._end_id: int | None = tokenizer.eos_token_id

    def __enter__(self) -> Self:
        """Borrow the backend."""
        self._rows.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Give the backend back."""
        self._rows.__exit__(*error)

    def tokenize(self, examples: Sequence[tuple[int, Example]], counts: SplitCounts) -> list[TokenizedPrompt]:
        """Tokenize some prompts.

        Args:
            examples: id and example of each, from ``prompt_reader``.
            counts: receives what happens to them; those that cannot be asked are counted there alone.
        """
        rendered = self._rows.render(self._batch_of(examples), counts)
        columns = self._rows.finish(rendered, self._rows.encode(rendered), counts)
        return list(self._cut(columns, counts))

    def _batch_of(self, examples: Sequence[tuple[int, Example]]) -> pa.RecordBatch:
        rows = [
            (row_id, *example.values, 0, *([example.column_ranges] if self._is_composed else []))
            for row_id, example in examples
        ]
        columns = zip(zip(*rows, strict=True), self._schema, strict=True)
        return pa.record_batch([pa.array(values, kind.type) for values, kind in columns], schema=self._schema)

    def _cut(self, columns: TokenColumns, counts: SplitCounts) -> Iterator[TokenizedPrompt]:
        for index, row_id in enumerate(columns.row_ids.tolist()):
            ids = columns.ids[columns.id_offsets[index] : columns.id_offsets[index + 1]].tolist()
            # The placeholder is the last span, so its start is the last edge but one.
            start = len(ids) if self._is_text else int(columns.spans[columns.span_offsets[index + 1] - 2])
            if self._is_text and ids[-1] == self._end_id:  # which ends every training row
                start -= 1
            prompt = ids[:start]
            if self._is_text and len(prompt) > self._room:
                # The end is what the answer goes on with.
                begins = prompt[:1] if prompt[0] == self._begin_id else []
                prompt = [*begins, *prompt[len(prompt) - self._room + len(begins) :]]
                counts.add(BEGINNING_CUT, row_id)
            yield TokenizedPrompt(row_id, prompt, ids[start:])
