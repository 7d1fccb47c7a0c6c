"""Make one answer and tell its text while it comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lm_tuning.answering.models import Ends
from lm_tuning.batching.held_out_loss import evaluating
from lm_tuning.generation.answers import Answer, answer_text
from lm_tuning.generation.continuous_batching import ContinuousBatcher, takes_continuous_batches
from lm_tuning.generation.generate import generate_answers
from lm_tuning.generation.stop_strings import StopStrings
from lm_tuning.parameters.generation import GenerationParameters
from lm_tuning.text.decoding import decode, special_ids

_HALF_A_CHARACTER = "\ufffd"


class TextStream:
    """Turns tokens that come one by one into text, and holds back what may still change or be cut off."""

    def __init__(self, tokenizer: Any, stop_strings: Sequence[str], write: Callable[[str], object]) -> None:
        """Begin without text.

        Args:
            tokenizer: of the model.
            stop_strings: texts at which the answer ends; a beginning of one is held back until it is known for none.
            write: gets each new part of the text.
        """
        self._tokenizer = tokenizer
        self._stop_strings = stop_strings
        self._write = write
        self._shown = ""

    def update(self, ids: Sequence[int]) -> None:
        """Write what is new and certain.

        Args:
            ids: all tokens of the answer so far, ``(tokens,)``.
        """
        text = decode(self._tokenizer, ids, skip_special_tokens=True)
        self._show(text[: len(text) - self._num_uncertain(text)])

    def finish(self, text: str) -> None:
        """Write the rest of the answer.

        Args:
            text: the whole answer.
        """
        self._show(text)

    def _show(self, text: str) -> None:
        # A tokenizer may word the end of a text in another way once more follows: then the rest waits.
        if text.startswith(self._shown) and len(text) > len(self._shown):
            self._write(text[len(self._shown) :])
            self._shown = text

    def _num_uncertain(self, text: str) -> int:
        """Return how many characters at the end may be half of one, or the beginning of a stop string."""
        half = len(text) - len(text.rstrip(_HALF_A_CHARACTER))
        longest = max(map(len, self._stop_strings), default=0)
        begun = (
            size
            for size in range(min(longest, len(text)), 0, -1)
            if any(stop.startswith(text[-size:]) or stop in text[-size:] for stop in self._stop_strings)
        )
        return max(half, next(begun, 0))


@dataclass(frozen=True)
class Answering:
    """How a model answers at the terminal.

    Attributes:
        tokenizer: of the model.
        generation: how tokens are chosen.
        ends: how answers end.
        device: where the model lies.
        seed: start of the random numbers, where tokens are drawn.
    """

    tokenizer: Any
    generation: GenerationParameters
    ends: Ends
    device: str
    seed: int


def stream_answer(
    model: Any, prompt: list[int], answering: Answering, *, turn: int, write: Callable[[str], object]
) -> tuple[Answer, str]:
    """Answer one prompt.

    Text comes as it is made where the model takes continuous batches and one beam is searched; otherwise all at once.

    Args:
        model: on its device.
        prompt: token ids, ``(prompt tokens,)``, which leave room for the answer.
        answering: how.
        turn: names the random numbers of this answer.
        write: gets each new part of the text.

    Returns:
        The answer, and its text.
    """
    generation, tokenizer = answering.generation, answering.tokenizer
    stream = TextStream(tokenizer, generation.stop_strings, write)
    pad_id = int(tokenizer.pad_token_id)
    if generation.num_beams == 1 and takes_continuous_batches(model):
        strings = StopStrings(tokenizer, generation.stop_strings) if generation.stop_strings else None
        batcher = ContinuousBatcher(
            model,
            [prompt],
            generation=generation,
            most_rows=1,
            stop_ids=answering.ends.stop_ids,
            pad_id=pad_id,
            device=answering.device,
            seed=answering.seed,
            row_ids=[turn],
            stop_strings=strings,
        )
        with evaluating(model):
            [answer] = batcher.run(lambda: stream.update(batcher.answers.tokens(0)))
    else:
        [answer] = generate_answers(
            model,
            [prompt],
            generation=generation,
            batch_rows=1,
            stop_ids=answering.ends.stop_ids,
            pad_id=pad_id,
            device=answering.device,
            seed=answering.seed,
            row_ids=[turn],
            tokenizer=tokenizer,
            first_id=answering.ends.first_id,
            special_ids=special_ids(tokenizer),
        )
    text = answer_text(tokenizer, answer)
    stream.finish(text)
    return answer, text
