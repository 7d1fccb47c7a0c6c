"""What a model answered, and how an answer comes to its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lm_tuning.generation.stop_strings import StopStrings
from lm_tuning.text.decoding import decode

FinishReason = Literal["stop", "length", "stop_string"]
"""An EOS token came, the answer has all the tokens that it may have, or one of the stop strings came."""


@dataclass(frozen=True)
class Answer:
    """What a model answered to one prompt.

    Attributes:
        ids: token ids without the EOS token, ``(answer tokens,)``; where a stop string came, the tokens that lie
            wholly before it.
        finish_reason: why the answer ended.
        log_prob: sum of the natural logarithms of the probabilities of ``ids``, and of the EOS token where one came,
            under the model without penalties and temperature; ``None`` under beam search, which does not tell it.
        text: the text before the stop string, where one came: it may end within a token. ``None`` for other answers.
    """

    ids: list[int]
    finish_reason: FinishReason
    log_prob: float | None
    text: str | None = None


OnAnswer = Callable[[int, Answer], object]
"""Told the index of a prompt and its answer as soon as that has ended."""


def ignore_answer(index: int, answer: Answer) -> None:
    """Do nothing with an answer that has ended."""


def answer_text(tokenizer: Any, answer: Answer) -> str:
    """Return an answer as text, character for character and without special tokens.

    Args:
        tokenizer: of the model.
        answer: the answer.
    """
    return decode(tokenizer, answer.ids, skip_special_tokens=True) if answer.text is None else answer.text


def finish_answer(
    tokens: Sequence[int],
    log_probs: Sequence[float] | None,
    *,
    stop_ids: Collection[int],
    stop_strings: StopStrings | None,
) -> Answer:
    """Cut what a model made where the answer ends.

    Args:
        tokens: token ids, ``(tokens,)``, with whatever follows the end.
        log_probs: natural logarithm of each one's probability, ``(tokens,)``; ``None`` where nobody knows.
        stop_ids: EOS tokens.
        stop_strings: strings that end an answer; ``None`` without any.
    """
    num_kept = next((index for index, token in enumerate(tokens) if token in stop_ids), len(tokens))
    num_counted = min(num_kept + 1, len(tokens))
    reason: FinishReason = "stop" if num_kept < len(tokens) else "length"
    text = None
    # A string that came before the EOS token ended the answer, though it was looked for only now.
    end = None if stop_strings is None else stop_strings.find(tokens[:num_kept])
    if end is not None:
        num_kept = num_counted = end.num_tokens
        reason, text = "stop_string", end.text
    log_prob = None if log_probs is None else math.fsum(log_probs[:num_counted])
    return Answer(list(tokens[:num_kept]), reason, log_prob, text)


class GrowingAnswers:
    """Answers that get their tokens one by one.

    Attributes:
        ended: the answer to each prompt, ``None`` until it has ended.
        num_tokens: tokens of all answers so far.
    """

    def __init__(
        self,
        num_prompts: int,
        *,
        max_new_tokens: int,
        stop_ids: Collection[int],
        stop_strings: StopStrings | None,
        on_answer: OnAnswer,
    ) -> None:
        """Begin with answers without a token.

        Args:
            num_prompts: how many.
            max_new_tokens: longest answer.
            stop_ids: EOS tokens.
            stop_strings: strings that end an answer; ``None`` without any.
            on_answer: told of each answer that has ended.
        """
        self.ended: list[Answer | None] = [None] * num_prompts
        self.num_tokens = 0
        self._max_new_tokens = max_new_tokens
        self._stop_ids = frozenset(stop_ids)
        self._stop_strings = stop_strings
        self._on_answer = on_answer
        # Of answers that have begun and not ended: figures of single tokens need not be kept for the others.
        self._tokens: dict[int, list[int]] = {}
        self._log_probs: dict[int, list[float]] = {}

    def tokens(self, index: int) -> list[int]:
        """Return the tokens that an answer has which has not ended, ``(tokens,)``."""
        return self._tokens.get(index, [])

    def num_left(self, index: int) -> int:
        """Return how many tokens an answer may still get which has not ended."""
        return self._max_new_tokens - len(self.tokens(index))

    def add(self, index: int, token: int, log_prob: float) -> bool:
        """Add a token; return whether it ends the answer, as EOS token or as the last one that there is room for."""
        tokens = self._tokens.setdefault(index, [])
        tokens.append(token)
        self._log_probs.setdefault(index, []).append(log_prob)
        is_stop = token in self._stop_ids
        self.num_tokens += not is_stop
        if is_stop or len(tokens) == self._max_new_tokens:
            self._end(index)
            return True
        return False

    def look_for_string(self, index: int, num_new: int) -> bool:
        """Return whether an answer has come to a stop string with its last tokens, which ends it."""
        if self._stop_strings is None or not self._stop_strings.may_have_come(self.tokens(index), num_new):
            return False
        answer = self._finished(index)
        if answer.finish_reason != "stop_string":
            return False
        self._end(index)
        return True

    def _finished(self, index: int) -> Answer:
        return finish_answer(
            self._tokens[index], self._log_probs[index], stop_ids=self._stop_ids, stop_strings=self._stop_strings
        )

    def _end(self, index: int) -> None:
        answer = self._finished(index)
        num_made = sum(token not in self._stop_ids for token in self._tokens.pop(index))
        del self._log_probs[index]
        self.num_tokens += len(answer.ids) - num_made
        self.ended[index] = answer
        self._on_answer(index, answer)
