"""Hold the token table against tokenizer and model, before the first step; needs no forward pass and no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from lm_tuning.models.positions import Positions, find_positions
from lm_tuning.text.token_table import TokenTable
from lm_tuning.training.health import Finding
from lm_tuning.wording import count_of

TOKENS_LOOKED_AT = 20_000_000
"""Tokens whose values are read, evenly spread over a larger table; lengths and counts are read of all rows."""

FAR_FEWER_TOKENS = 0.9
"""Tokens over embedding rows; vocabularies are padded up by a few hundred rows at most."""

FEW_ROWS = 0.01
"""Share of rows with nothing to learn that truncation explains."""


def check_tokenizer(tokenizer: Any, model: Any) -> list[Finding]:
    """Check that tokenizer and model belong together.

    Args:
        tokenizer: as training uses it.
        model: as it will be trained.
    """
    found = []
    num_tokens, num_rows = len(tokenizer), count_embeddings(model)
    if num_tokens > num_rows:
        found.append(
            Finding(
                code="more-tokens-than-embeddings",
                measured=f"the tokenizer has {num_tokens} tokens, the model embeds {num_rows}",
                expected="an embedding for every token",
                cause="The tokenizer is another model's, or tokens were added to it without making the model larger.",
                change="Look at model.name_or_path: its tokenizer and weights must come together.",
            )
        )
    elif num_tokens < FAR_FEWER_TOKENS * num_rows:
        found.append(
            Finding(
                code="fewer-tokens-than-embeddings",
                measured=f"the tokenizer has {num_tokens} tokens, the model embeds {num_rows}",
                expected="about as many; a model's vocabulary is padded up by a few hundred",
                cause="The tokenizer may be another model's.",
                change="Look at model.name_or_path and at the first example in the health report.",
            )
        )
    configured = getattr(model.config, "pad_token_id", None)
    if configured is None or configured != tokenizer.pad_token_id:
        found.append(
            Finding(
                code="pad-id-not-in-config",
                measured=f"the model's configuration has the pad id {configured}, the tokenizer "
                f"{tokenizer.pad_token_id}",
                expected="the same id in both",
                cause="A classifier of transformers finds a row's last token by it, and pads its batches with it.",
                change="Load the model with the pad id of the tokenizer (load_model does).",
            )
        )
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id:
        found.append(
            Finding(
                code="pad-is-eos",
                measured=f"the pad token is the end token, {tokenizer.eos_token!r}",
                expected="a pad token of its own, to be safe with other programs",
                cause="Nothing is lost here, since masks come from lengths; programs that hide every pad id from the "
                "loss hide the end token too.",
                change="Nothing has to be changed.",
            )
        )
    return found


def count_embeddings(model: Any) -> int:
    """Count the token ids that the model can embed."""
    return int(model.get_input_embeddings().weight.shape[0])


def check_table(table: TokenTable, model: Any, tokenizer: Any, *, task: str) -> tuple[dict[str, Any], list[Finding]]:
    """Check the training rows.

    Args:
        table: tokenized training rows.
        model: as it will be trained.
        tokenizer: the model's.
        task: ``causal_lm``, ``sequence_classification`` or ``seq2seq_lm``.

    Returns:
        What was measured, and what is wrong.
    """
    if len(table) == 0:
        return {}, []
    seen = _read_ids(table, bos_id=tokenizer.bos_token_id, end_ids=special_ids(tokenizer))
    facts: dict[str, Any] = {
        "rows_looked_at": seen.num_rows,
        "largest_token_id": seen.largest_id,
        "longest_row_tokens": int(table.lengths.max()),
        "rows_that_teach_nothing": int((table.num_supervised == 0).sum()),
    }
    found = []
    if task != "sequence_classification":
        facts["rows_that_teach_the_end_fraction"] = seen.num_taught_ends / seen.num_rows
        if seen.num_taught_ends == 0:
            found.append(
                Finding(
                    code="end-not-taught",
                    measured=f"none of {count_of(seen.num_rows, 'row')} has an end token that is learned",
                    expected="every answer ends with one",
                    cause="The model will not learn to stop.",
                    change="Look at tokenize.truncation and at the chat template.",
                )
            )
    if seen.num_doubled_bos:
        found.append(
            Finding(
                code="bos-doubled",
                measured=f"{seen.num_doubled_bos} of {count_of(seen.num_rows, 'row')} "
                f"{'begins' if seen.num_doubled_bos == 1 else 'begin'} with two {tokenizer.bos_token!r}",
                expected="one at most",
                cause="The chat template or the data writes it, and the tokenizer adds another.",
                change="Take it out of the data or the template.",
            )
        )
    found += _check_ids(seen, count_embeddings(model))
    found += _check_classes(table, model, task)
    found += _check_supervision(table)
    found += _check_lengths(table, find_positions(model), task)
    return facts, found


def special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of all control tokens, any of which may end a turn."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return set(tokenizer.all_special_ids) | added


def _check_ids(seen: _SeenIds, num_embeddings: int) -> list[Finding]:
    if 0 <= seen.smallest_id and seen.largest_id < num_embeddings:
        return []
    return [
        Finding(
            code="id-beyond-vocabulary",
            measured=f"the rows hold token ids from {seen.smallest_id} to {seen.largest_id}",
            expected=f"ids from 0 to {num_embeddings - 1}, which the model embeds",
            cause="The rows were tokenized for another model.",
            change="Run the tokenize pipeline again with this model.",
        )
    ]


def _check_classes(table: TokenTable, model: Any, task: str) -> list[Finding]:
    if task != "sequence_classification" or int(table.labels.max()) < int(model.config.num_labels):
        return []
    return [
        Finding(
            code="class-beyond-head",
            measured=f"the rows have classes up to {int(table.labels.max())}",
            expected=f"classes from 0 to {int(model.config.num_labels) - 1}, which the head tells apart",
            cause="The head was made for another label map.",
            change="Run split and tokenize again, or take a base model without a head.",
        )
    ]


def _check_supervision(table: TokenTable) -> list[Finding]:
    empty = np.flatnonzero(table.num_supervised == 0)
    if not len(empty):
        return []
    share = len(empty) / len(table)
    first = ", ".join(str(int(row_id)) for row_id in table.row_ids[empty[:5]])
    return [
        Finding(
            code="rows-teach-nothing",
            severity="note" if share < FEW_ROWS else None,
            measured=f"{len(empty)} of {count_of(len(table), 'row')} ({share:.1%}) "
            f"{'has' if len(empty) == 1 else 'have'} nothing that is learned, such as row {first}",
            expected="something to learn in each",
            cause="All their labels are masked, as when an answer is cut off or a class is missing.",
            change="Look at tokenize.max_length_tokens, tokenize.truncation and tokenize.loss_on.",
        )
    ]


def _check_lengths(table: TokenTable, positions: Positions | None, task: str) -> list[Finding]:
    if positions is None:
        return []
    lengths = table.lengths
    if task == "seq2seq_lm":
        lengths = np.maximum(table.lengths - table.num_supervised, table.num_supervised)
    num_long = int((lengths > positions.limit).sum())
    if not num_long:
        return []
    return [
        Finding(
            code="rows-longer-than-positions",
            severity="stop" if positions.are_learned else None,
            measured=f"{num_long} of {count_of(len(table), 'row')} {'is' if num_long == 1 else 'are'} longer than "
            f"{positions.limit} tokens, the longest has {int(lengths.max())}",
            expected=f"at most the {positions.limit} positions of the model",
            cause="The model has no weights for later positions."
            if positions.are_learned
            else "The model was never trained on such positions and is bad at them.",
            change=f"Set tokenize.max_length_tokens to {positions.limit} or less.",
        )
    ]


@dataclass
class _SeenIds:
    num_rows: int = 0
    smallest_id: int = 0
    largest_id: int = 0
    num_doubled_bos: int = 0
    num_taught_ends: int = 0


def _read_ids(table: TokenTable, *, bos_id: int | None, end_ids: set[int]) -> _SeenIds:
    """Go over the ids of the table, or of evenly spread parts of a large one."""
    seen = _SeenIds()
    ends = np.fromiter(end_ids, dtype=np.int64)
    for batch in _spread_batches(table):
        ids, starts, stops = _parts(batch.column("input_ids"))
        spans, span_starts, span_stops = _parts(batch.column("spans"))
        seen.num_rows += len(starts)
        used = ids[starts[0] : stops[-1]]
        if len(used):
            seen.smallest_id = min(seen.smallest_id, int(used.min()))
            seen.largest_id = max(seen.largest_id, int(used.max()))
        if bos_id is not None:
            first = starts[stops - starts >= 2]
            seen.num_doubled_bos += int(((ids[first] == bos_id) & (ids[first + 1] == bos_id)).sum())
        with_spans = span_stops > span_starts
        span_ends = spans[span_stops[with_spans] - 1]
        last_spans = spans[span_stops[with_spans] - 2]
        row_starts = starts[with_spans]
        is_end = np.isin(ids[row_starts + span_ends - 1], ends)
        # A newline may follow the end of a turn inside the same span.
        longer = span_ends - 2 >= last_spans
        is_end[longer] |= np.isin(ids[row_starts[longer] + span_ends[longer] - 2], ends)
        seen.num_taught_ends += int(is_end.sum())
    return seen


def _spread_batches(table: TokenTable) -> Iterator[Any]:
    stride = max(1, -(-int(table.lengths.sum(dtype=np.int64)) // TOKENS_LOOKED_AT))
    return (batch for batch in islice(table.batches(), 0, None, stride) if batch.num_rows)


def _parts(column: Any) -> tuple[Any, Any, Any]:
    """Return the flat values of a list column, and where each row starts and stops in them."""
    offsets = column.offsets.to_numpy()
    return column.values.to_numpy(), offsets[:-1], offsets[1:]
