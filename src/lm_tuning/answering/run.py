"""Answer a file of prompts: every answer goes to disk as it comes, and work that was stopped goes on."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import pyarrow as pa

from lm_tuning.answering.models import AskedModel, check_bits, digest_model, find_asked_model, find_ends, load_asked
from lm_tuning.answering.prompts import PromptSource, read_prompt_batches, write_prompts
from lm_tuning.answering.records import AnswerFigures, AnswersRecord, GeneratedRow, PromptsWritten
from lm_tuning.answering.wording import Wording, as_trained, read_wording
from lm_tuning.data.records import SourceFile
from lm_tuning.data.sources.describe import describe_named
from lm_tuning.errors import UserError
from lm_tuning.evaluation.settings import EvaluationSettings, choose_settings
from lm_tuning.generation.answers import Answer, answer_text
from lm_tuning.generation.generate import Keys, generate_answers
from lm_tuning.json_types import JsonObject
from lm_tuning.models.quantization import weight_bytes
from lm_tuning.models.structure import check_answer_room
from lm_tuning.parameters.data import ColumnParameters, DataParameters, TokenizeParameters
from lm_tuning.parameters.evaluate import EvaluateParameters
from lm_tuning.parameters.generate import GenerateParameters
from lm_tuning.parameters.groups import EnvironmentParameters, ModelParameters
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.runtime.precision import autocast
from lm_tuning.storage.atomic import write_json_atomic
from lm_tuning.storage.digests import digest_values
from lm_tuning.storage.row_stream import RowStream
from lm_tuning.text.decoding import special_ids
from lm_tuning.wording import count_of, write_speed

logger = logging.getLogger(__name__)

STREAM_NAME = "generated"
PROMPTS_NAME = "prompts.arrow"
FACTS_NAME = "answered_by.json"
KEYS = Keys("generate.generation.max_new_tokens", "generate.batch_rows", instead="")
_PROMPTS, _TOKENS = "Answering prompts", "Tokens of answers"
ANSWERS_VERSION = 1
"""Raise it when the same prompts are asked in another way: answers of an earlier version are not gone on with."""


@dataclass(frozen=True)
class AnswerSettings:
    """What decides the answers beside the model.

    Attributes:
        generate: the ``generate`` parameters.
        data: the ``data`` parameters.
        tokenize: the ``tokenize`` parameters.
        evaluation: device, dtypes and the seed.
        digest_cache: see ``digest_files``.
    """

    generate: GenerateParameters
    data: DataParameters
    tokenize: TokenizeParameters
    evaluation: EvaluationSettings
    digest_cache: Path | None = None

    @classmethod
    def choose(
        cls,
        tuned_folder: Path,
        generate: GenerateParameters,
        data: DataParameters,
        tokenize: TokenizeParameters,
        *,
        model: ModelParameters,
        environment: EnvironmentParameters,
        seed: int,
        cache: Path | None = None,
    ) -> Self:
        """Choose device and dtypes as for an evaluation, and put the parameters beside them.

        Args:
            tuned_folder: adapter or full weights with their ``tuning.json``.
            generate: the ``generate`` parameters.
            data: the ``data`` parameters.
            tokenize: the ``tokenize`` parameters.
            model: the ``model`` parameters.
            environment: the ``environment`` parameters.
            seed: of the run, where ``generate.generation.seed`` names none.
            cache: see ``digest_files``.

        Raises:
            UserError: the tuned model cannot be read, or the device does not have the dtype of ``model.dtype``.
        """
        own = generate.generation.seed
        seed = seed if own is None else own
        evaluation = choose_settings(tuned_folder, EvaluateParameters(), model, environment, seed=seed)
        return cls(generate, data, tokenize, evaluation, cache)


def answer_prompts(
    tuned_folder: Path, work: Path, settings: AnswerSettings, *, on_progress: OnProgress = ignore_progress
) -> tuple[Path, AnswersRecord]:
    """Answer all prompts; those that a run with the same model, prompts and settings has answered stay as they are.

    Args:
        tuned_folder: adapter or full weights with their ``tuning.json``.
        work: a folder of its own, where answers are until all are there.
        settings: everything else.
        on_progress: told rows read, and tokens of answers as they come.

    Returns:
        The finished file, one JSON object a line in the order of the prompts, to be moved to where it belongs; and the
        figures.

    Raises:
        UserError: everything that is wrong with model, files, columns or rows, before any weights are loaded.
    """
    generate = settings.generate
    asked = find_asked_model(tuned_folder)
    files = _find_files(generate, settings.digest_cache)
    check_bits(generate.quantization, settings.evaluation)
    check_answer_room(
        asked.config,
        max_new_tokens=generate.generation.max_new_tokens,
        key=KEYS.max_new_tokens,
        instead=KEYS.instead,
    )
    wording = read_wording(
        asked.tuning,
        asked.tokenizer,
        asked.config,
        settings.tokenize,
        max_new_tokens=generate.generation.max_new_tokens,
    )
    source = _read_as(settings, files)
    facts = _describe_work(settings, asked, wording, source)
    prompts = write_prompts(work / PROMPTS_NAME, source, asked.tokenizer, wording, on_progress=on_progress)
    with RowStream(work, STREAM_NAME, key=digest_values(facts), row_field="row_id") as stream:
        _tell_of_earlier(work, facts, stream, num_prompts=prompts.record["num_prompts"])
        run = _AnswerRun(settings, asked, prompts, stream, on_progress)
        run.answer_all()
        record = run.describe()
        finished = stream.finish()
    prompts.path.unlink()
    return finished, record


def describe_answers(record: AnswersRecord) -> str:
    """Describe in a few lines what was answered, for the log.

    Args:
        record: see :func:`answer_prompts`.
    """
    figures = record["figures"]
    before = f", {figures['num_answered_before']:,} of them in earlier runs" if figures["num_answered_before"] else ""
    speed = figures["tokens_per_second"]
    at = f", {write_speed(speed)} tokens per second in this run" if speed else ""
    ends = ", ".join(f"{number:,} {reason}" for reason, number in figures["finish_reasons"].items())
    return (
        f"{count_of(figures['num_answers'], 'prompt')} answered by the {record['model']} model{before}: "
        f"{count_of(figures['num_tokens'], 'token')}{at}; ended by {ends or 'nothing'}; {figures['num_empty']:,} empty."
    )


def _find_files(generate: GenerateParameters, cache: Path | None) -> list[SourceFile]:
    if generate.prompts is None:
        raise UserError(
            "generate.prompts = null: name the file of prompts, such as generate.prompts: data/01_raw/prompts.jsonl."
        )
    return describe_named(generate.prompts, "generate.prompts", split="test", digest_cache=cache)[0]


def _read_as(settings: AnswerSettings, files: Sequence[SourceFile]) -> PromptSource:
    """Settle how the prompts are read: by parameters of their own, or as the training rows."""
    generate, data = settings.generate, settings.data
    if generate.template is not None or generate.columns != ColumnParameters():
        own = {"columns": generate.columns, "template": generate.template, "format": "auto"}
        return PromptSource(files, data.model_copy(update=own), group="generate", max_rows=generate.max_rows)
    return PromptSource(files, as_trained(data), max_rows=generate.max_rows)


def _describe_work(settings: AnswerSettings, asked: AskedModel, wording: Wording, source: PromptSource) -> JsonObject:
    """Return all that the answers depend on; work is gone on with where it is the same."""
    generate, evaluation, data = settings.generate, settings.evaluation, source.data
    return {
        "version": ANSWERS_VERSION,
        "prompts": [f"{file['path']} {file['digest']}" for file in source.files],
        "generate.model": generate.model,
        "tuned model": digest_model(asked.folder, cache=settings.digest_cache),
        "base model": f"{asked.tuning['base']['digest']} {asked.tuning['base']['tokenizer_digest']}",
        "generate.generation": cast(JsonObject, generate.generation.model_dump(mode="json")),
        "generate.quantization": generate.quantization,
        "generate.max_rows": str(generate.max_rows),
        "seed": evaluation.seed if generate.generation.do_sample else None,
        "wording": cast(JsonObject, wording.settings.model_dump(mode="json")),
        "reading": {
            "columns": cast(JsonObject, data.columns.model_dump()),
            **data.model_dump(
                include={"template", "format", "normalize", "delimiter", "field", "explode", "max_row_bytes"}
            ),
        },
        "precision": " ".join(
            (evaluation.device, evaluation.weights_dtype, evaluation.compute_dtype, evaluation.attention)
        ),
    }


def _tell_of_earlier(work: Path, facts: JsonObject, stream: RowStream, *, num_prompts: int) -> None:
    """Log what an earlier run has left: answers to go on from, or answers that are none to these prompts."""
    path = work / FACTS_NAME
    if stream.num_resumed:
        logger.info(
            "Going on: %d of %s answered already, in %s.", len(stream), count_of(num_prompts, "prompt"), stream.path
        )
    elif stream.others:
        before = _read_facts(path)
        changed = [name for name, value in facts.items() if before.get(name) != value]
        logger.warning(
            "Answers of a run that did not end are in %s. They are not gone on with, since something else is asked "
            "now (%s): all prompts are answered from the beginning.",
            ", ".join(map(str, stream.others)),
            ", ".join(changed) or "unknown",
        )
    write_json_atomic(path, facts)


def _read_facts(path: Path) -> JsonObject:
    try:
        return cast(JsonObject, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):  # a killed run may not have come to write it
        return {}


class _AnswerRun:
    """Answers the prompts of a file that are not answered yet, a few thousand at a time."""

    def __init__(
        self,
        settings: AnswerSettings,
        asked: AskedModel,
        prompts: PromptsWritten,
        stream: RowStream,
        on_progress: OnProgress,
    ) -> None:
        self._settings, self._asked, self._prompts = settings, asked, prompts
        self._stream, self._on_progress = stream, on_progress
        self._special = special_ids(asked.tokenizer)
        self._num_before = len(stream)
        self._num_tokens = self._num_tokens_before = 0
        self._seconds = 0.0
        self._weights_bytes: int | None = None

    def answer_all(self) -> None:
        """Load the model and answer; without a prompt that waits no weights are loaded.

        Raises:
            UserError: the model cannot be loaded.
        """
        if len(self._stream) == self._prompts.record["num_prompts"]:
            logger.info("All prompts are answered already.")
            return
        name = self._settings.generate.model
        model = load_asked(
            self._asked, self._settings.evaluation, name=name, quantization=self._settings.generate.quantization
        )
        self._weights_bytes = weight_bytes(model)
        ends = find_ends(self._asked, model, name=name, reference_ids=self._prompts.reference_ids)
        began = time.monotonic()
        self._on_progress(_PROMPTS, len(self._stream), self._prompts.record["num_prompts"], "prompts")
        self._on_progress(_TOKENS, 0, None, "tokens")
        try:
            for batch in read_prompt_batches(self._prompts.path):
                self._answer(model, batch, ends.stop_ids, ends.first_id)
            self._on_progress(_TOKENS, self._num_tokens, self._num_tokens, "tokens")
        finally:
            self._seconds = time.monotonic() - began
            if len(self._stream) < self._prompts.record["num_prompts"]:
                logger.warning(
                    "%d of %d prompts are answered and kept in %s: the same command goes on from there.",
                    len(self._stream),
                    self._prompts.record["num_prompts"],
                    self._stream.path,
                )

    def _answer(self, model: Any, batch: pa.RecordBatch, stop_ids: list[int], first_id: int | None) -> None:
        """Answer those prompts of a batch that wait."""
        rows = [row for row in batch.to_pylist() if row["row_id"] not in self._stream.done]
        if not rows:
            return
        generate, evaluation = self._settings.generate, self._settings.evaluation

        def keep(index: int, answer: Answer) -> None:
            if answer.log_prob is not None and not math.isfinite(answer.log_prob):
                file, number = self._prompts.files[rows[index]["file"]]["path"], rows[index]["row"]
                raise UserError(
                    f"The {generate.model} model gives no number as the probability of its answer to row {number} of "
                    f"{file}: its weights may be damaged. Train again or copy it again."
                )
            self._num_tokens += len(answer.ids)
            self._stream.append([cast(JsonObject, self._row(rows[index], answer))])
            self._on_progress(_PROMPTS, len(self._stream), self._prompts.record["num_prompts"], "prompts")

        self._num_tokens_before = self._num_tokens

        with autocast(evaluation.device, evaluation.compute_dtype):
            generate_answers(
                model,
                [row["input_ids"] for row in rows],
                generation=generate.generation,
                row_ids=[row["row_id"] for row in rows],
                seed=evaluation.seed,
                tokenizer=self._asked.tokenizer,
                batch_rows=None if generate.batch_rows == "auto" else generate.batch_rows,
                stop_ids=stop_ids,
                pad_id=int(self._asked.tokenizer.pad_token_id),
                device=evaluation.device,
                first_id=first_id,
                special_ids=self._special,
                keys=KEYS,
                on_answer=keep,
                on_progress=self._report,
            )

    def _report(self, what: str, done: int, total: int | None, unit: str) -> None:
        """Show tokens as they come, whatever batch they are of; nobody knows how many there will be."""
        self._on_progress(_TOKENS, self._num_tokens_before + done, None, unit)

    def _row(self, prompt: dict[str, Any], answer: Answer) -> GeneratedRow:
        return {
            "row_id": prompt["row_id"],
            "file": self._prompts.files[prompt["file"]]["path"],
            "row": prompt["row"],
            "prompt": json.loads(prompt["prompt"]),
            "answer": answer_text(self._asked.tokenizer, answer),
            "num_tokens": len(answer.ids),
            "finish_reason": answer.finish_reason,
            "log_probability": answer.log_prob,
        }

    def describe(self) -> AnswersRecord:
        """Return who answered, how, and the figures of all answers."""
        generate = self._settings.generate
        return {
            "model": generate.model,
            "model_folder": str(self._asked.folder),
            "base": self._asked.tuning["base"]["name_or_path"],
            "quantization": generate.quantization,
            "generation": cast(JsonObject, generate.generation.model_dump(mode="json")),
            "reading": self._prompts.reading,
            "format": self._prompts.format,
            "figures": self._count(),
        }

    def _count(self) -> AnswerFigures:
        """Count all answers, those of earlier runs included, one after the other."""
        reasons: Counter[str] = Counter()
        num_tokens = num_empty = num_with_log = 0
        nats = 0.0
        for row in cast("Iterable[GeneratedRow]", self._stream.rows()):
            reasons[row["finish_reason"]] += 1
            num_tokens += row["num_tokens"]
            num_empty += not row["answer"].strip()
            if row["log_probability"] is not None:
                nats -= row["log_probability"]
                num_with_log += row["num_tokens"] + (row["finish_reason"] == "stop")
        num_answers, seconds = len(self._stream), self._seconds
        num_now = num_answers - self._num_before
        return {
            "prompts": self._prompts.record,
            "num_answers": num_answers,
            "num_answered_now": num_now,
            "num_answered_before": self._num_before,
            "num_empty": num_empty,
            "num_tokens": num_tokens,
            "mean_tokens": num_tokens / num_answers if num_answers else None,
            "nats_per_token": nats / num_with_log if num_with_log else None,
            "finish_reasons": dict(sorted(reasons.items())),
            "weights_bytes": self._weights_bytes,
            "seconds": seconds,
            "tokens_per_second": self._num_tokens / seconds if seconds else None,
            "answers_per_second": num_now / seconds if seconds else None,
        }
