"""Answer prompts by ``generate`` of transformers, in batches that run until their longest answer ends.

For beam search, and for models whose cache is none for continuous batches. Tokens are drawn by the random numbers of
``sampling``, so that a row draws what it would draw there.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from lm_tuning.generation.answers import Answer, OnAnswer, finish_answer
from lm_tuning.generation.continuous_batching import warn_of_memory
from lm_tuning.generation.reading_prompts import pad_prompts
from lm_tuning.generation.sampling import draw_tokens, uniforms_of
from lm_tuning.generation.stop_strings import StopStrings
from lm_tuning.models.generation_settings import library_settings, plain_settings
from lm_tuning.models.structure import has_encoder, inner_model
from lm_tuning.parameters.generation import GenerationParameters
from lm_tuning.runtime.memory_errors import is_out_of_memory


@dataclass(frozen=True)
class LibraryRules:
    """How ``generate`` is called.

    Attributes:
        generation: how tokens are chosen, and the longest answer.
        stop_ids: EOS tokens of an answer.
        pad_id: fills shorter prompts.
        first_id: token that every answer of an encoder-decoder is made to begin with; ``None`` for none.
        seed: of the random numbers, where tokens are drawn.
        row_ids: name each prompt's random numbers.
        stop_strings: strings that end an answer; ``None`` without any.
        batch_rows_key: the parameter that a warning names.
    """

    generation: GenerationParameters
    stop_ids: Sequence[int]
    pad_id: int
    first_id: int | None
    seed: int
    row_ids: Sequence[int]
    stop_strings: StopStrings | None
    batch_rows_key: str


def generate_in_batches(
    model: Any,
    prompts: Sequence[Sequence[int]],
    rules: LibraryRules,
    *,
    batch_rows: int,
    device: torch.device | str,
    on_tokens: Callable[[int, int], object],
    on_answer: OnAnswer,
) -> list[Answer]:
    """Let ``generate`` answer prompts; fewer at once for lack of memory.

    Args:
        model: a language model in evaluation mode; its settings of generation are given back as they were.
        prompts: token ids of each.
        rules: how it is called.
        batch_rows: prompts of a batch.
        device: where the model lies.
        on_tokens: told the tokens of the answers so far, and the most that there can still be.
        on_answer: told of each answer when its batch is done.

    Returns:
        The answers, in the order of the prompts.
    """
    config = _make_config(model, rules)
    watch = _Watch(rules, num_waiting=len(prompts), device=device, on_tokens=on_tokens)
    watch.tell()
    answers: dict[int, Answer] = {}
    # Longest first: neighbours need little padding, and what does not fit into memory fails at once.
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    has_halved = False
    with _generating_by(model, config):
        while order:
            chosen = order[:batch_rows]
            failed = False
            try:
                made = _generate_batch(model, prompts, chosen, config, watch)
            except (RuntimeError, MemoryError) as error:
                if len(chosen) == 1 or not is_out_of_memory(error):
                    raise
                traceback.clear_frames(error.__traceback__)
                failed = True
            # Behind the block: inside of it the error still holds the tensors of the batch that failed.
            if failed:
                watch.drop_batch(len(chosen))
                batch_rows = len(chosen) // 2
                if torch.device(device).type == "cuda":
                    torch.cuda.empty_cache()
                if not has_halved:
                    warn_of_memory(len(chosen), batch_rows, key=rules.batch_rows_key)
                has_halved = True
                continue
            for index, answer in zip(chosen, made, strict=True):
                answers[index] = answer
                on_answer(index, answer)
            order = order[batch_rows:]
    return [answers[index] for index in range(len(prompts))]


def _make_config(model: Any, rules: LibraryRules) -> Any:
    """Return settings that say what the rules say and nothing of the model's own."""
    own = inner_model(model).config
    reads_apart = has_encoder(own)
    # What the model's own settings say of sampling or penalties is set aside, so that two models answer by one rule.
    # Nothing is drawn by the library: _DrawnTokens leaves one token to choose from.
    settings = library_settings(rules.generation) | {"do_sample": False}
    for name in ("temperature", "top_k", "top_p"):
        settings.pop(name, None)
    return plain_settings(
        **settings,
        use_cache=True,
        max_new_tokens=rules.generation.max_new_tokens,
        eos_token_id=list(rules.stop_ids) or None,
        pad_token_id=rules.pad_id,
        decoder_start_token_id=own.decoder_start_token_id if reads_apart else None,
        forced_bos_token_id=rules.first_id if reads_apart else None,
    )


def _generate_batch(
    model: Any, prompts: Sequence[Sequence[int]], chosen: Sequence[int], config: Any, watch: _Watch
) -> list[Answer]:
    """Let ``generate`` answer some prompts side by side."""
    rules = watch.rules
    reads_apart = has_encoder(inner_model(model).config)
    input_ids, attention_mask = pad_prompts(
        [prompts[index] for index in chosen], pad_id=rules.pad_id, side="right" if reads_apart else "left"
    )
    # ``generate`` gives back what it was given too: the prompt, or the token that a decoder starts from.
    num_given = 1 if reads_apart else input_ids.shape[1]
    watch.start_batch(len(chosen), num_given)
    processors = LogitsProcessorList()
    if rules.generation.do_sample:
        processors.append(_DrawnTokens(rules, chosen, num_given, watch.device))
    with watch.reading_logits(model):
        output = model.generate(  # (batch, given tokens + longest answer)
            input_ids=input_ids.to(watch.device),
            attention_mask=attention_mask.to(watch.device),
            generation_config=config,
            logits_processor=processors,
            stopping_criteria=StoppingCriteriaList([watch]),
        )
    watch.end_batch()
    # One copy to the host for the batch, after the last token.
    tokens: list[list[int]] = output[:, num_given:].tolist()
    log_probs = watch.log_probs_of_rows()
    return [
        finish_answer(
            ids,
            None if log_probs is None else log_probs[row],
            stop_ids=frozenset(rules.stop_ids),
            stop_strings=rules.stop_strings,
        )
        for row, ids in enumerate(tokens)
    ]


class _DrawnTokens(LogitsProcessor):
    """Leaves each row one token to choose from, drawn by the row's own random numbers."""

    def __init__(self, rules: LibraryRules, chosen: Sequence[int], num_given: int, device: torch.device | str) -> None:
        self._generation = rules.generation
        self._num_given = num_given
        most = rules.generation.max_new_tokens
        uniforms = [uniforms_of(rules.seed, rules.row_ids[index], most) for index in chosen]
        self._uniforms = torch.from_numpy(np.stack(uniforms)).to(device)  # (batch, longest answer)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores, ``(batch, vocabulary)``, that are finite for the drawn tokens alone."""
        uniforms = self._uniforms[:, input_ids.shape[1] - self._num_given]
        tokens = draw_tokens(scores.float(), uniforms, self._generation)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)


class _Watch:
    """Looks on while ``generate`` makes answers: counts their tokens, keeps probabilities, and stops at strings.

    ``generate`` asks it after each token whether to stop. Its sum waits for the device once per token, as ``generate``
    itself does. Beams are shown to it in an order of their own, so there it counts a token for each row and step, and
    keeps no probabilities.

    Attributes:
        rules: how ``generate`` is called.
        device: where the model lies.
    """

    def __init__(
        self,
        rules: LibraryRules,
        *,
        num_waiting: int,
        device: torch.device | str,
        on_tokens: Callable[[int, int], object],
    ) -> None:
        self.rules = rules
        self.device = device
        self._num_tokens = self._num_before = 0
        self._on_tokens = on_tokens
        self._stops = torch.tensor(list(rules.stop_ids), dtype=torch.long, device=device)  # (stop tokens,)
        self._num_waiting = num_waiting
        self._has_beams = rules.generation.num_beams > 1
        self._num_running = self._steps = self._num_given = 0
        self._is_running = torch.zeros(0, dtype=torch.bool, device=device)
        self._logits: torch.Tensor | None = None
        self._log_probs: list[torch.Tensor] = []

    def tell(self) -> None:
        """Report the tokens so far, and those in the end if no answer ends early from here on."""
        most = self.rules.generation.max_new_tokens
        # Rows of this batch from the present step on, and those of later batches from their first.
        left = self._num_running * (most - self._steps) + self._num_waiting * most
        self._on_tokens(self._num_tokens, self._num_tokens + left)

    def start_batch(self, num_rows: int, num_given: int) -> None:
        """Count the rows of a batch as running, and no longer as waiting."""
        self._num_waiting -= num_rows
        self._num_running, self._steps, self._num_before = num_rows, 0, self._num_tokens
        self._num_given = num_given
        self._is_running = torch.ones(num_rows, dtype=torch.bool, device=self.device)
        self._log_probs = []

    def drop_batch(self, num_rows: int) -> None:
        """Count the rows of a batch that failed as waiting again, and none of their tokens."""
        self._num_waiting += num_rows
        self._num_running, self._num_tokens = 0, self._num_before
        self._log_probs = []
        self.tell()

    def end_batch(self) -> None:
        """Expect no more tokens of beams that ended before the longest answer."""
        if self._has_beams:
            self._num_running = 0
            self.tell()

    @contextmanager
    def reading_logits(self, model: Any) -> Iterator[None]:
        """See the logits of each step before penalties change them."""
        if self._has_beams:
            yield
            return

        def keep(module: object, given: object, output: Any) -> None:
            self._logits = output.logits[:, -1].float()  # (batch, vocabulary)

        handle = inner_model(model).register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()
            self._logits = None

    def log_probs_of_rows(self) -> list[list[float]] | None:
        """Return the logarithms of the tokens' probabilities, ``(batch, tokens)``; ``None`` under beam search."""
        if self._has_beams:
            return None
        rows: list[list[float]] = torch.stack(self._log_probs, dim=1).tolist()
        return rows

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        """Return for each row of ``input_ids``, ``(batch, tokens so far)``, whether it has come to a stop string."""
        self._steps += 1
        # Beams change their order from step to step, so which of them has ended cannot be told by its index.
        if not self._has_beams:
            last = input_ids[:, -1:]  # (batch, 1)
            assert self._logits is not None, "the model has been called"
            self._log_probs.append((self._logits.gather(1, last) - self._logits.logsumexp(-1, keepdim=True))[:, 0])
            # What follows a stop token is padding, so a row never runs again.
            self._is_running &= ~torch.isin(last[:, 0], self._stops)  # (batch,)
        ends = self._find_strings(input_ids)
        if not self._has_beams:
            self._num_running = int(self._is_running.sum())
            self._is_running &= ~ends
        self._num_tokens += self._num_running
        self.tell()
        return ends

    def _find_strings(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return which rows have come to a stop string, ``(batch,)``; a row per beam under beam search."""
        ends = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        strings = self.rules.stop_strings
        if strings is not None:
            rows = range(len(input_ids)) if self._has_beams else self._is_running.nonzero()[:, 0].tolist()
            tokens = input_ids[:, self._num_given :].tolist()
            came = [row for row in rows if strings.may_have_come(tokens[row], 1) and strings.find(tokens[row])]
            ends[came] = True
        return ends


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
