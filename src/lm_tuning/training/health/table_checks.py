"""Check the token table against tokenizer and model before any row goes through the model; needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from lm_tuning.models.structure import Positions, find_positions
from lm_tuning.text.decoding import special_ids
from lm_tuning.text.records import NO_LABEL
from lm_tuning.text.store.table import TokenTable
from lm_tuning.training.health.records import OF_CODE, Facts, Finding, listing
from lm_tuning.training.health.table_reading import (
    SHOWN_ROWS,
    SeenRows,
    find_outside_ids,
    find_rows_with,
    name_rows,
    read_rows,
)
from lm_tuning.wording import count_of

# Tokens among which BOS and ends are looked for, evenly spread over a larger table. Ids, lengths and classes are read
# of all rows: a single id that the model does not embed ends a run, on a GPU without saying which row it was.
TOKENS_CHECKED = 20_000_000

# Tokens over embedding rows; vocabularies are padded up by a few hundred rows at most.
FAR_FEWER_TOKENS = 0.9

# Share of rows with nothing to learn that truncation explains.
FEW_ROWS = 0.01

# Share of such rows that no truncation explains: the tokenize pipeline leaves rows without an answer out.
MANY_ROWS = 0.1


@listing
def check_tokenizer(tokenizer: Any, model: Any) -> Iterator[Finding]:
    """Check that tokenizer and model belong together.

    Args:
        tokenizer: as training uses it.
        model: as it will be trained.
    """
    # len() counts added tokens too; vocab_size does not, and lies below the largest id.
    num_tokens, num_rows = len(tokenizer), count_embeddings(model)
    if num_tokens > num_rows:
        yield Finding(
            code="more-tokens-than-embeddings",
            measured=f"the tokenizer has {num_tokens} tokens, the model embeds {num_rows}",
            expected="an embedding for every token",
            cause="The tokenizer is another model's, or tokens were added to it without making the model larger.",
            change="Look at model.name_or_path: its tokenizer and weights must come together.",
        )
    elif num_tokens < FAR_FEWER_TOKENS * num_rows:
        yield Finding(
            code="fewer-tokens-than-embeddings",
            measured=f"the tokenizer has {num_tokens} tokens, the model embeds {num_rows}",
            expected="about as many; a model's vocabulary is padded up by a few hundred",
            cause="The tokenizer may be another model's.",
            change="Look at model.name_or_path and at the first example in the health report.",
        )
    configured = getattr(model.config, "pad_token_id", None)
    if configured is None or configured != tokenizer.pad_token_id:
        yield Finding(
            code="pad-id-not-in-config",
            measured=f"the model's configuration has the pad id {configured}, the tokenizer {tokenizer.pad_token_id}",
            expected="the same id in both",
            cause="A classifier of transformers finds a row's last token by it, and pads its batches with it.",
            change="Load the model with the pad id of the tokenizer (load_model does).",
        )
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id:
        yield Finding(
            code="pad-is-eos",
            measured=f"the pad token is the EOS token, {tokenizer.eos_token!r}",
            expected="a pad token of its own, to be safe with other programs",
            cause="Nothing is lost here, since masks come from lengths; programs that hide every pad id from the "
            "loss hide the EOS token too.",
            change="Nothing has to be changed.",
        )


def count_embeddings(model: Any) -> int:
    """Count the token ids that the model can embed."""
    return int(model.get_input_embeddings().weight.shape[0])


def check_table(table: TokenTable, model: Any, tokenizer: Any, *, task: str) -> tuple[Facts, list[Finding]]:
    """Check the training rows.

    Args:
        table: tokenized training rows.
        model: as it will be trained, with or without weights.
        tokenizer: the model's.
        task: ``causal_lm``, ``sequence_classification`` or ``seq2seq_lm``.

    Returns:
        What was measured, and what is wrong.
    """
    if len(table) == 0:
        return {}, []
    # One pass over the file for all checks: a table of millions of rows is read from the disk as it goes.
    seen = _read(table, tokenizer, task)
    facts: Facts = {
        "rows_looked_at": seen.num_rows,
        "largest_token_id": seen.largest_id,
        "longest_row_tokens": int(table.lengths.max()),
        "rows_that_teach_nothing": int((table.num_supervised == 0).sum()),
    }
    contradictions = list(_check_columns(table, seen))
    if contradictions:
        return facts, contradictions  # the other checks would follow columns that contradict each other
    if task != "sequence_classification":
        facts["rows_that_teach_the_end_fraction"] = seen.num_taught_ends / seen.num_rows
    return facts, [
        *_check_ends(table, seen, tokenizer, task),
        *_check_ids(table, seen, count_embeddings(model), tokenizer, "rows"),
        *_check_classes(table, model, task, "rows"),
        *_check_supervision(table, task),
        *_check_lengths(table, find_positions(model), task),
    ]


def check_held_out_rows(table: TokenTable, model: Any, tokenizer: Any, *, task: str, split: str) -> list[Finding]:
    """Check that held-out rows can go through the model, which happens in the middle of a training, or after it.

    Args:
        table: tokenized rows; may be none.
        model: as it will be trained, with or without weights.
        tokenizer: the model's.
        task: as for :func:`check_table`.
        split: ``validation`` or ``test``.
    """
    if len(table) == 0:
        return []
    seen = _read(table, tokenizer, task)
    return list(_check_columns(table, seen)) or [
        *_check_ids(table, seen, count_embeddings(model), tokenizer, f"{split} rows"),
        *_check_classes(table, model, task, f"{split} rows"),
    ]


def _read(table: TokenTable, tokenizer: Any, task: str) -> SeenRows:
    return read_rows(
        table, bos_id=tokenizer.bos_token_id, end_ids=special_ids(tokenizer), task=task, tokens_checked=TOKENS_CHECKED
    )


def _check_columns(table: TokenTable, seen: SeenRows) -> Iterator[Finding]:
    """Find rows without tokens, and columns that contradict each other: no such row can be laid out."""
    again = "Run the tokenize pipeline again; if the finding stays, look at what writes the table."
    if seen.contradictions:
        yield Finding(
            code="table-inconsistent",
            measured=f"in the token table {table.path}, {'; '.join(seen.contradictions)}",
            expected="columns that agree",
            cause="The file was changed or written by something else than the tokenize pipeline.",
            change=again,
            is_fatal=True,
        )
    empty = table.row_ids[table.lengths == 0].tolist()
    if empty:
        yield Finding(
            code="row-without-tokens",
            measured=f"{len(empty)} of {count_of(len(table), 'row')} {'has' if len(empty) == 1 else 'have'} no token "
            f"({name_rows(empty)})",
            expected="a token at least in each",
            cause="The tokenize pipeline leaves such rows out, so the table was written or changed by something else.",
            change=again,
            is_fatal=True,
        )


def _check_ends(table: TokenTable, seen: SeenRows, tokenizer: Any, task: str) -> Iterator[Finding]:
    if task != "sequence_classification" and seen.num_taught_ends == 0 and np.any(table.num_supervised):
        yield Finding(
            code="end-not-taught",
            measured=f"none of {count_of(seen.num_rows, 'row')} has an EOS token that is supervised",
            expected="every answer ends with one",
            cause="The model will not learn to stop.",
            change="Look at tokenize.truncation and at the chat template.",
        )
    if seen.num_doubled_bos:
        yield Finding(
            code="bos-doubled",
            measured=f"{seen.num_doubled_bos} of {count_of(seen.num_rows, 'row')} "
            f"{'begins' if seen.num_doubled_bos == 1 else 'begin'} with two {tokenizer.bos_token!r}",
            expected="one at most",
            cause="The chat template or the data writes it, and the tokenizer adds another.",
            change="Take it out of the data or the template.",
        )


def _check_ids(table: TokenTable, seen: SeenRows, num_embeddings: int, tokenizer: Any, what: str) -> Iterator[Finding]:
    # The rows are looked for only where there are any: a second pass over the table.
    if 0 <= seen.smallest_id and seen.largest_id < num_embeddings:
        return
    rows, outside = find_rows_with(table, 0, num_embeddings), find_outside_ids(table, 0, num_embeddings)
    names = ", ".join(f"{token_id} ({_name_token(tokenizer, token_id)})" for token_id in outside[:SHOWN_ROWS])
    are_added = len(tokenizer) > num_embeddings and all(0 <= token_id < len(tokenizer) for token_id in outside)
    if are_added:
        cause = (
            f"The tokenizer has {len(tokenizer)} tokens: some were added to it without making the model larger, or it "
            "is another model's."
        )
        change = (
            "Take the tokenizer that belongs to the model, or enlarge the embedding once (resize_token_embeddings) and "
            "save the model; then run the tokenize pipeline again."
        )
    else:
        cause = "The rows were tokenized for another model."
        change = "Run the tokenize pipeline again with this model."
    yield Finding(
        code="id-beyond-vocabulary",
        measured=f"the {what} hold token ids from {seen.smallest_id} to {seen.largest_id}",
        expected=f"ids from 0 to {num_embeddings - 1}, which the model embeds",
        cause=f"{cause} {len(rows):,} of {count_of(len(table), 'row')} "
        f"{'holds' if len(rows) == 1 else 'hold'} such ids ({name_rows(rows)}): {names}.",
        change=change,
        is_fatal=True,
    )


def _name_token(tokenizer: Any, token_id: int) -> str:
    token = tokenizer.convert_ids_to_tokens(token_id) if 0 <= token_id < len(tokenizer) else None
    return "no token" if token is None else repr(token)


def _check_classes(table: TokenTable, model: Any, task: str, what: str) -> Iterator[Finding]:
    if task != "sequence_classification":
        return
    # A class beyond the head is an assertion inside of a CUDA kernel, after which the process can use the GPU no more.
    num_classes = int(model.config.num_labels)
    labels = table.labels
    is_outside = (labels >= num_classes) | ((labels < 0) & (labels != NO_LABEL))
    if what != "rows":  # training rows without a class have nothing that is supervised, which is said of them
        is_outside |= labels == NO_LABEL
    outside = table.row_ids[is_outside].tolist()
    if not outside:
        return
    low, high = int(labels.min()), int(labels.max())
    yield Finding(
        code="class-beyond-head",
        measured=f"the {what} have classes up to {high}"
        if low >= NO_LABEL
        else f"the {what} have classes from {low} to {high}",
        expected=f"classes from 0 to {num_classes - 1}, which the head tells apart",
        cause="The head was made for another label map. "
        f"{len(outside):,} of {count_of(len(table), 'row')} {'has' if len(outside) == 1 else 'have'} such a class "
        f"({name_rows(outside)}).",
        change="Run split and tokenize again, or take a base model without a head.",
        is_fatal=True,
    )


def _check_supervision(table: TokenTable, task: str) -> Iterator[Finding]:
    empty = np.flatnonzero(table.num_supervised == 0)
    if not len(empty):
        return
    # A few are what truncation leaves behind; many are a loss mask or a template that does not fit.
    share = len(empty) / len(table)
    severity = OF_CODE
    if share < FEW_ROWS:
        severity = "note"
    elif (share >= MANY_ROWS and len(empty) > 1) or share == 1:
        severity = "stop"
    # A classifier compares each row with its class, and a decoder starts from a target's tokens.
    is_fatal = task != "causal_lm"
    first = table.row_ids[empty[:SHOWN_ROWS]].tolist()
    yield Finding(
        code="rows-teach-nothing",
        severity="stop" if is_fatal else severity,
        measured=f"{len(empty)} of {count_of(len(table), 'row')} ({share:.1%}) "
        f"{'has' if len(empty) == 1 else 'have'} nothing that is supervised, such as {name_rows(first)}",
        expected="something to learn in each",
        cause="All their labels are masked, as when an answer is cut off or a class is missing.",
        change="Look at tokenize.max_length_tokens, tokenize.truncation and tokenize.loss_on.",
        is_fatal=is_fatal,
    )


@listing
def check_step_supervision(table: TokenTable, rows: Any) -> Iterator[Finding]:
    """Check before rows are laid out that the first step teaches something.

    Args:
        table: tokenized training rows.
        rows: indices of the step's rows.
    """
    if len(rows) and not np.any(table.num_supervised[rows]):
        yield step_teaches_nothing(step=1, num_tokens=int(table.lengths[rows].sum()))


def step_teaches_nothing(*, step: int, num_tokens: int) -> Finding:
    """Describe a step without anything supervised.

    Args:
        step: optimizer step from 1.
        num_tokens: its real tokens.
    """
    return Finding(
        code="step-teaches-nothing",
        measured=f"none of the {num_tokens} tokens of step {step} is supervised",
        expected="some in every step",
        cause="All labels are masked, and a loss divided by 0 is NaN.",
        change="Look at tokenize.loss_on, tokenize.truncation and tokenize.max_length_tokens.",
    )


def _check_lengths(table: TokenTable, positions: Positions | None, task: str) -> Iterator[Finding]:
    if positions is None:
        return
    lengths = table.lengths
    if task == "seq2seq_lm":
        # (rows,): encoder and decoder count positions of their own, so the longer part of a row decides.
        lengths = np.maximum(table.lengths - table.num_supervised, table.num_supervised)
    num_long = int((lengths > positions.limit).sum())
    if not num_long:
        return
    yield Finding(
        code="rows-longer-than-positions",
        severity="stop" if positions.are_learned else OF_CODE,
        measured=f"{num_long} of {count_of(len(table), 'row')} {'is' if num_long == 1 else 'are'} longer than "
        f"{positions.limit} tokens, the longest has {int(lengths.max())}",
        expected=f"at most the {positions.limit} positions of the model",
        cause="The model has no weights for later positions."
        if positions.are_learned
        else "The model was never trained on such positions and is bad at them.",
        change=f"Set tokenize.max_length_tokens to {positions.limit} or less.",
    )
