"""Answer held-out prompts greedily, by sampling or by beam search; by continuous batching where the cache allows it."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lm_tuning.batching.held_out_loss import evaluating
from lm_tuning.generation.continuous_batching import ContinuousBatcher, takes_continuous_batches, warn_of_memory
from lm_tuning.generation.reading_prompts import pad_prompts
from lm_tuning.generation.sampling import Sampling
from lm_tuning.models.generation_settings import plain_settings, stop_ids_of
from lm_tuning.models.structure import check_answer_room, has_encoder, inner_model, position_limit
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.runtime.memory_errors import is_out_of_memory
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


def generate_answers(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_rows: int | None,
    stop_ids: Sequence[int],
    pad_id: int,
    device: torch.device | str,
    num_beams: int = 1,
    sampling: Sampling | None = None,
    first_id: int | None = None,
    special_ids: Collection[int] = (),
    on_progress: OnProgress = ignore_progress,
    label: str = "Generating",
) -> list[list[int]]:
    """Let a model answer each prompt with its most likely tokens, or with tokens drawn at random.

    A causal model goes on after the prompt; an encoder-decoder reads it with its encoder. What the model's own
    generation settings say about sampling or penalties is set aside, so that two models are compared by the same
    rule. A prompt that leaves no room for the answer in the model's context is cut, see ``shorten_prompt``.

    Args:
        model: a language model on ``device``; mode and generation settings are given back as they were.
        prompts: token ids of each prompt, at least one.
        max_new_tokens: longest answer.
        batch_rows: prompts answered at once; it changes speed and memory, and in float32 not the answers. ``None``
            takes 16 on a CPU, and on a GPU what its memory holds where the model takes continuous batches.
        stop_ids: EOS tokens of an answer; they are not part of it.
        pad_id: fills shorter prompts, behind an attention mask: their start for a causal model, their end for an
            encoder, whose positions count from its first token.
        device: where the model lies.
        num_beams: number of beams; 1 takes the likeliest token each time.
        sampling: how tokens are drawn instead; ``None`` draws none. It goes with one beam.
        first_id: token that every answer of an encoder-decoder is made to begin with; ``None`` for none.
        special_ids: tokens that stay in a prompt which is cut.
        on_progress: told the tokens of the answers as they come; the total is the most that there can still be, and
            falls as answers end. Under beam search every answer counts until its batch is done.
        label: what the progress is called.

    Returns:
        The new token ids of each prompt, in the order of the prompts.

    Raises:
        UserError: an answer of that length leaves no room for a prompt.
        ValueError: tokens are to be drawn under beam search.
    """
    if sampling is not None and num_beams > 1:
        raise ValueError(f"sampling draws one answer at a time: num_beams must be 1, not {num_beams}")
    own = inner_model(model).config
    reads_apart, context = has_encoder(own), position_limit(own)
    check_answer_room(own, max_new_tokens=max_new_tokens)
    # An encoder has its positions for the prompt alone; in a causal model prompt and answer share them.
    room = context if context is None or reads_apart else context - max_new_tokens
    kept = [
        list(prompt) if room is None or len(prompt) <= room else shorten_prompt(prompt, room, special_ids)
        for prompt in prompts
    ]
    num_cut = sum(len(short) < len(prompt) for short, prompt in zip(kept, prompts, strict=True))
    if num_cut:
        logger.warning(
            "Too long to answer, so cut in the middle: %s; the context is %s tokens.",
            count_of(num_cut, "prompt"),
            context,
        )

    if num_beams == 1 and takes_continuous_batches(model):
        batcher = ContinuousBatcher(
            model,
            kept,
            max_new_tokens=max_new_tokens,
            most_rows=batch_rows,
            stop_ids=stop_ids,
            pad_id=pad_id,
            device=device,
            sampling=sampling,
        )

        def report() -> None:
            on_progress(label, batcher.num_tokens, batcher.most_tokens, "tokens")

        report()
        with evaluating(model):
            return batcher.run(report)
    # What the model's own settings say of sampling or penalties is set aside, so that two models answer by one rule.
    config = plain_settings(
        use_cache=True,
        max_new_tokens=max_new_tokens,
        num_beams=num_beams,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=pad_id,
        decoder_start_token_id=own.decoder_start_token_id if reads_apart else None,
        forced_bos_token_id=first_id if reads_apart else None,
        **({} if sampling is None else _describe_sampling(sampling)),
    )
    counter = _TokenCounter(
        stop_ids, max_new_tokens=max_new_tokens, num_waiting=len(kept), num_beams=num_beams, device=device
    )
    counter.on_step = lambda: on_progress(label, counter.num_tokens, counter.most_tokens, "tokens")
    counter.on_step()
    random = nullcontext() if sampling is None else _drawing(sampling.seed, device)
    with evaluating(model), _generating_by(model, config), random:
        return _generate_in_batches(model, kept, config, counter, batch_rows=batch_rows or _USUAL_ROWS)


def _describe_sampling(sampling: Sampling) -> dict[str, object]:
    """Return the settings of ``generate`` for drawn tokens."""
    # Its 0 takes all tokens, where None would take its usual 50.
    top_k = sampling.top_k or 0
    return {"do_sample": True, "temperature": sampling.temperature, "top_k": top_k, "top_p": sampling.top_p}


@contextmanager
def _drawing(seed: int, device: torch.device | str) -> Iterator[None]:
    """Draw by a seed in the block, and leave the run's random state as it was."""
    with torch.random.fork_rng(devices=[device] if torch.device(device).type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _generate_in_batches(
    model: Any, prompts: Sequence[Sequence[int]], config: Any, counter: _TokenCounter, *, batch_rows: int
) -> list[list[int]]:
    """Let ``generate`` answer batches of prompts, each until its longest answer ends, fewer for lack of memory."""
    answers: list[list[int]] = [[] for _ in prompts]
    # Longest first: neighbours need little padding, and what does not fit into memory fails at once.
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    has_halved = False
    while order:
        chosen = order[:batch_rows]
        failed = False
        try:
            tokens_of_rows = _generate_batch(model, [prompts[index] for index in chosen], config, counter)
        except (RuntimeError, MemoryError) as error:
            if len(chosen) == 1 or not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)
            failed = True
        # Behind the block: inside of it the error still holds the tensors of the batch that failed.
        if failed:
            counter.drop_batch(len(chosen))
            batch_rows = len(chosen) // 2
            if torch.device(counter.device).type == "cuda":
                torch.cuda.empty_cache()
            if not has_halved:
                warn_of_memory(len(chosen), batch_rows)
            has_halved = True
            continue
        for index, tokens in zip(chosen, tokens_of_rows, strict=True):
            answers[index] = cut_at(tokens, config.eos_token_id or ())
        order = order[batch_rows:]
    return answers


def _generate_batch(
    model: Any, prompts: Sequence[Sequence[int]], config: Any, counter: _TokenCounter
) -> list[list[int]]:
    """Let ``generate`` answer prompts side by side; return the new tokens of each, and what is behind its end."""
    from transformers import StoppingCriteriaList

    reads_apart = has_encoder(inner_model(model).config)
    input_ids, attention_mask = pad_prompts(
        prompts, pad_id=config.pad_token_id, side="right" if reads_apart else "left"
    )
    counter.start_batch(len(prompts))
    output = model.generate(  # (batch, given tokens + longest answer)
        input_ids=input_ids.to(counter.device),
        attention_mask=attention_mask.to(counter.device),
        generation_config=config,
        stopping_criteria=StoppingCriteriaList([counter]),
    )
    counter.end_batch()
    # ``generate`` gives back what it was given too: the prompt, or the token that a decoder starts from.
    num_given = 1 if reads_apart else input_ids.shape[1]
    # One copy to the host for the batch, after the last token.
    tokens: list[list[int]] = output[:, num_given:].tolist()
    return tokens


class _TokenCounter:
    """Count the tokens of answers while ``generate`` makes them, which asks it after each token whether to stop.

    It never stops anything. Its sum waits for the device once per token, as ``generate`` itself does. Beams are shown
    to it in an order of their own, so there it counts a token for each row and step.

    Attributes:
        device: where the model lies.
        num_tokens: tokens that belong to answers so far.
        on_step: called after each step.
    """

    def __init__(
        self,
        stop_ids: Sequence[int],
        *,
        max_new_tokens: int,
        num_waiting: int,
        num_beams: int,
        device: torch.device | str,
    ) -> None:
        self.device = device
        self.num_tokens = 0
        self.on_step: Callable[[], None] = lambda: None
        self._stops = torch.tensor(list(stop_ids), dtype=torch.long, device=device)  # (stop tokens,)
        self._max_new_tokens = max_new_tokens
        self._num_waiting = num_waiting
        self._has_beams = num_beams > 1
        self._num_running = self._steps = self._num_before = 0
        self._is_running = torch.zeros(0, dtype=torch.bool, device=device)

    @property
    def most_tokens(self) -> int:
        """Tokens in the end if no answer ends early from here on."""
        # Rows of this batch from the present step on, and those of later batches from their first.
        left = self._num_running * (self._max_new_tokens - self._steps) + self._num_waiting * self._max_new_tokens
        return self.num_tokens + left

    def start_batch(self, num_rows: int) -> None:
        """Count the rows of a batch as running, and no longer as waiting."""
        self._num_waiting -= num_rows
        self._num_running, self._steps, self._num_before = num_rows, 0, self.num_tokens
        self._is_running = torch.ones(num_rows, dtype=torch.bool, device=self._stops.device)

    def drop_batch(self, num_rows: int) -> None:
        """Count the rows of a batch that failed as waiting again, and none of their tokens."""
        self._num_waiting += num_rows
        self._num_running, self.num_tokens = 0, self._num_before
        self.on_step()

    def end_batch(self) -> None:
        """Expect no more tokens of beams that ended before the longest answer."""
        if self._has_beams:
            self._num_running = 0
            self.on_step()

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        # Beams change their order from step to step, so which of them has ended cannot be told by its index.
        if not self._has_beams:
            # input_ids: (batch, tokens so far). What follows a stop token is padding, so a row never runs again.
            self._is_running &= ~torch.isin(input_ids[:, -1], self._stops)  # (batch,)
            self._num_running = int(self._is_running.sum())
        self._steps += 1
        self.num_tokens += self._num_running
        self.on_step()
        # The verdict "go on" for each row of input_ids, which under beam search is one per beam.
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)  # (batch,)


def cut_at(tokens: Sequence[int], stop_ids: Iterable[int]) -> list[int]:
    """Return the tokens before the first stop token; after it a batch only holds padding."""
    stops = set(stop_ids)
    end = next((index for index, token in enumerate(tokens) if token in stops), len(tokens))
    return list(tokens[:end])


@contextmanager
def _generating_by(model: Any, config: Any) -> Iterator[None]:
    """Replace the model's own settings, which ``generate`` would merge in and warn about."""
    # An adapter's wrapper has settings of its own, which it hands to the model inside.
    owners = [model] if inner_model(model) is model else [model, inner_model(model)]
    before = [owner.generation_config for owner in owners]
    for owner in owners:
        owner.generation_config = config
    try:
        yield
    finally:
        for owner, config_before in zip(owners, before, strict=True):
            owner.generation_config = config_before
