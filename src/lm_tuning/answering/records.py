"""What answering a file of prompts stores, and what its parts hand to each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from lm_tuning.data.records import FileRows
from lm_tuning.json_types import JsonObject, JsonValue


class GeneratedRow(TypedDict):
    """One line of ``generated.jsonl``.

    ``row`` is the 1-based number in the file; ``row_id`` counts on over several files. ``prompt`` is a text, or the
    turns of a conversation. ``log_probability`` sums the natural logarithms of the probabilities that the model gave
    the tokens of the answer; None where the way of decoding tells none.
    """

    row_id: int
    file: str
    row: int
    prompt: JsonValue
    answer: str
    num_tokens: int
    finish_reason: str
    log_probability: float | None


class PromptsRecord(TypedDict):
    """What became of the rows of the prompt files."""

    num_read: int
    num_prompts: int
    num_skipped: int
    num_shortened: int


class AnswerFigures(TypedDict):
    """Numbers of all answers.

    Speed is that of this run, which may have gone on after another; it and ``weights_bytes``, the memory of the
    weights, are None where no prompt was left to answer.
    """

    prompts: PromptsRecord
    num_answers: int
    num_answered_now: int
    num_answered_before: int
    num_empty: int
    num_tokens: int
    mean_tokens: float | None
    nats_per_token: float | None
    finish_reasons: dict[str, int]
    weights_bytes: int | None
    seconds: float
    tokens_per_second: float | None
    answers_per_second: float | None


class AnswersRecord(TypedDict):
    """``generation.json``: who answered what, how, and the figures, which MLflow gets as metrics."""

    model: str
    model_folder: str
    base: str
    quantization: str
    generation: JsonObject
    reading: str
    format: str
    figures: AnswerFigures


@dataclass(frozen=True)
class PromptsWritten:
    """A file of tokenized prompts.

    Attributes:
        path: the file, see ``prompts.PROMPT_SCHEMA``.
        files: what became of the rows of each file, in the order of reading.
        record: the same in numbers.
        reading: which columns were read as what.
        format: of the prompts.
        reference_ids: tokens of a placeholder answer, its end included: they show how the model's answers end.
    """

    path: Path
    files: list[FileRows]
    record: PromptsRecord
    reading: str
    format: str
    reference_ids: list[int]
