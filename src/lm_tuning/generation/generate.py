"""Answer prompts: the likeliest answers, drawn ones or those of beam search; a few at a time, as memory allows."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lm_tuning.batching.held_out_loss import evaluating
from lm_tuning.generation.answers import Answer, OnAnswer, ignore_answer
from lm_tuning.generation.continuous_batching import ContinuousBatcher, takes_continuous_batches
from lm_tuning.generation.library import LibraryRules, generate_in_batches
from lm_tuning.generation.stop_strings import StopStrings
from lm_tuning.models.generation_settings import stop_ids_of
from lm_tuning.models.structure import check_answer_room, has_encoder, inner_model, position_limit
from lm_tuning.parameters.generation import GenerationParameters
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.text.decoding import common_first_id, end_of_answer, special_ids
from lm_tuning.text.tokenizers.truncation import shorten_prompt
from lm_tuning.wording import count_of

if TYPE_CHECKING:
    from lm_tuning.text.store.table import TokenTable

logger = logging.getLogger(__name__)

_USUAL_ROWS = 16


@dataclass(frozen=True)
class Prompt:
    """A row cut before its last answer.

    Attributes:
        row_id: identity of the row.
        input_ids: what the model is given, ``(prompt tokens,)``.
        reference_ids: the answer that the row has, end of turn included, ``(answer tokens,)``.
    """

    row_id: int
    input_ids: list[int]
    reference_ids: list[int]


def collect_prompts(table: TokenTable, rows: Iterable[int]) -> list[Prompt]:
    """Cut rows before their last supervised span.

    Args:
        table: where the rows lie.
        rows: row indices.

    Returns:
        One prompt for each row that has one, in the given order. A row supervised from its start (plain text) has
        none: position 0 is never supervised, so a first token alone is not taken for a prompt.
    """
    prompts = []
    for index in rows:
        row = table[index]
        # The last span alone: earlier answers of a conversation are a part of what the last one replies to.
        if row.spans and row.spans[-1][0] > 1:
            start, end = row.spans[-1]
            ids = row.input_ids.tolist()
            prompts.append(Prompt(row.row_id, ids[:start], ids[start:end]))
    return prompts


def find_stop_ids(model: Any, tokenizer: Any, prompts: Sequence[Prompt]) -> list[int]:
    """Collect the tokens at which an answer ends.

    They are the tokenizer's and the model's EOS tokens and the special tokens at the ends of the answers in the rows:
    chat templates often end a turn with another token than the text's.

    Args:
        model: a language model.
        tokenizer: the tokenizer that made the rows.
        prompts: rows whose answers show how a turn ends.

    Returns:
        Token ids, ascending.
    """
    special = special_ids(tokenizer)
    ends = (end_of_answer(prompt.reference_ids, special) for prompt in prompts)
    return sorted(stop_ids_of(inner_model(model), tokenizer) | {end for end in ends if end is not None})


def find_first_id(tokenizer: Any, prompts: Sequence[Prompt], *, stop_ids: Iterable[int]) -> int | None:
    """Find the special token that all answers of an encoder-decoder begin with, such as BART's ``<s>``.

    A published model forces it while generating, by settings that are set aside here; read off the rows, it is the
    same for both models, and right for those whose tokenizer puts none.

    Args:
        tokenizer: the tokenizer that made the rows.
        prompts: rows with their answers.
        stop_ids: EOS tokens of an answer, which no answer is made to begin with.

    Returns:
        The token id; ``None`` when the answers begin with different tokens or with ordinary ones.
    """
    answers = (prompt.reference_ids for prompt in prompts)
    return common_first_id(answers, special_ids(tokenizer), stop_ids=stop_ids)


def own_first_id(model: Any) -> int | None:
    """Return the token that a model's own settings make its answers begin with, ``None`` without one.

    Args:
        model: a language model.
    """
    return getattr(inner_model(model).generation_config, "forced_bos_token_id", None)


@dataclass(frozen=True)
class Keys:
    """Parameters that messages name.

    Attributes:
        max_new_tokens: the longest answer.
        batch_rows: prompts answered at once.
        instead: what else a user may do where answers are too long; empty for nothing.
    """

    max_new_tokens: str = "evaluate.generation.max_new_tokens"
    batch_rows: str = "evaluate.generate_batch_rows"
    instead: str = "evaluate.num_generate_rows = 0 to measure without answers"


EVALUATION_KEYS = Keys()


def generate_answers(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    generation: GenerationParameters,
    batch_rows: int | None,
    stop_ids: Sequence[int],
    pad_id: int,
    device: torch.device | str,
    seed: int = 0,
    row_ids: Sequence[int] | None = None,
    tokenizer: Any = None,
    first_id: int | None = None,
    special_ids: Collection[int] = (),
    keys: Keys = EVALUATION_KEYS,
    on_progress: OnProgress = ignore_progress,
    on_answer: OnAnswer = ignore_answer,
    label: str = "Generating",
) -> list[Answer]:
    """Let a model answer each prompt.

    A causal model goes on after the prompt; an encoder-decoder reads it with its encoder. What the model's own
    generation settings say about sampling or penalties is set aside, so that two models are compared by the same
    rule. A prompt that leaves no room for the answer in the model's context is cut, see ``shorten_prompt``.

    Args:
        model: a language model on ``device``; mode and generation settings are given back as they were.
        prompts: token ids of each prompt, at least one.
        generation: how tokens are chosen, the longest answer, and strings that end one.
        batch_rows: prompts answered at once; it changes speed and memory, and in float32 not the answers. ``None``
            takes 16 on a CPU, and on a GPU what its memory holds where the model takes continuous batches.
        stop_ids: EOS tokens of an answer; they are not part of it.
        pad_id: fills shorter prompts, behind an attention mask: their start for a causal model, their end for an
            encoder, whose positions count from its first token.
        device: where the model lies.
        seed: start of the random numbers where ``generation`` names none.
        row_ids: a name for each prompt: its random numbers are made of it and of the seed, so that a row's answer is
            the same in another order and beside other rows. ``None`` takes their indices.
        tokenizer: of the model; needed where ``generation`` has stop strings.
        first_id: token that every answer of an encoder-decoder is made to begin with; ``None`` for none.
        special_ids: tokens that stay in a prompt which is cut.
        keys: parameters that messages name.
        on_progress: told the tokens of the answers as they come; the total is the most that there can still be, and
            falls as answers end. Under beam search every answer counts until its batch is done.
        on_answer: told the index of a prompt and its answer as soon as that has ended, or its batch has.
        label: what the progress is called.

    Returns:
        The answers, in the order of the prompts.

    Raises:
        UserError: an answer of that length leaves no room for a prompt.
        ValueError: tokens are to be drawn under beam search, or there are stop strings and no tokenizer.
    """
    if generation.do_sample and generation.num_beams > 1:
        raise ValueError(f"sampling draws one answer at a time: num_beams must be 1, not {generation.num_beams}")
    if generation.stop_strings and tokenizer is None:
        raise ValueError("stop strings are looked for in text, which takes a tokenizer")
    kept = _make_room(model, prompts, generation, special_ids=special_ids, keys=keys)
    names = range(len(prompts)) if row_ids is None else row_ids
    start = seed if generation.seed is None else generation.seed
    strings = StopStrings(tokenizer, generation.stop_strings) if generation.stop_strings else None
    if generation.num_beams == 1 and takes_continuous_batches(model):
        batcher = ContinuousBatcher(
            model,
            kept,
            generation=generation,
            most_rows=batch_rows,
            stop_ids=stop_ids,
            pad_id=pad_id,
            device=device,
            seed=start,
            row_ids=names,
            stop_strings=strings,
            batch_rows_key=keys.batch_rows,
            on_answer=on_answer,
        )

        def report() -> None:
            on_progress(label, batcher.num_tokens, batcher.most_tokens, "tokens")

        report()
        with evaluating(model):
            return batcher.run(report)
    why = "beams are searched" if generation.num_beams > 1 else f"the cache of {_kind_of(model)} takes no others"
    logger.info("Answers are made by generate of transformers in fixed batches, since %s.", why)
    rules = LibraryRules(
        generation=generation,
        stop_ids=stop_ids,
        pad_id=pad_id,
        first_id=first_id,
        seed=start,
        row_ids=names,
        stop_strings=strings,
        batch_rows_key=keys.batch_rows,
    )
    with evaluating(model):
        return generate_in_batches(
            model,
            kept,
            rules,
            batch_rows=batch_rows or _USUAL_ROWS,
            device=device,
            on_tokens=lambda done, most: on_progress(label, done, most, "tokens"),
            on_answer=on_answer,
        )


def _kind_of(model: Any) -> str:
    return str(inner_model(model).config.model_type)


def _make_room(
    model: Any,
    prompts: Sequence[Sequence[int]],
    generation: GenerationParameters,
    *,
    special_ids: Collection[int],
    keys: Keys,
) -> list[Sequence[int]]:
    """Cut prompts that leave no room for an answer in the model's positions, and say how many."""
    own = inner_model(model).config
    context = position_limit(own)
    check_answer_room(own, max_new_tokens=generation.max_new_tokens, key=keys.max_new_tokens, instead=keys.instead)
    # An encoder has its positions for the prompt alone; in a causal model prompt and answer share them.
    room = context if context is None or has_encoder(own) else context - generation.max_new_tokens
    # Those that fit are not copied.
    kept = [
        prompt if room is None or len(prompt) <= room else shorten_prompt(prompt, room, special_ids)
        for prompt in prompts
    ]
    num_cut = sum(len(short) < len(prompt) for short, prompt in zip(kept, prompts, strict=True))
    if num_cut:
        logger.warning(
            "Too long to answer, so cut in the middle: %s; the context is %s tokens.",
            count_of(num_cut, "prompt"),
            context,
        )
    return kept
