"""A conversation with a tuned model, its base, or both: what each is asked, and what it has said so far."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lm_tuning.answering.models import AskedModel, check_bits, find_asked_model, find_ends, load_asked
from lm_tuning.answering.streaming import Answering, stream_answer
from lm_tuning.answering.tokenizing import PromptTokenizer
from lm_tuning.answering.wording import Wording, as_trained, read_wording
from lm_tuning.data.check.findings import RowProblem
from lm_tuning.data.format.columns import MESSAGES, PROMPT_RESPONSE, TEXT, ColumnMapping, template_columns
from lm_tuning.data.format.prompts import prompt_reader
from lm_tuning.data.records import Cell, Row
from lm_tuning.errors import UserError
from lm_tuning.evaluation.settings import EvaluationSettings, choose_settings
from lm_tuning.models.structure import check_answer_room
from lm_tuning.parameters import Parameters
from lm_tuning.parameters.evaluate import EvaluateParameters
from lm_tuning.parameters.generation import QuantizationName
from lm_tuning.runtime.precision import autocast
from lm_tuning.text.tokenizers.counts import DROPPED, SplitCounts

MODELS = ("tuned", "base", "both")


@dataclass
class Speaker:
    """One model at the table.

    Attributes:
        name: ``tuned`` or ``base``.
        model: on its device.
        answering: how it answers.
        as_itself: a block in which ``model`` is this speaker: with the adapter, or without it.
        turns: what was said so far, its own answers among it.
    """

    name: str
    model: Any
    answering: Answering
    as_itself: Callable[[], AbstractContextManager[Any]] = nullcontext
    turns: list[dict[str, Cell]] = field(default_factory=list)


@dataclass(frozen=True)
class Reply:
    """What a model said.

    Attributes:
        text: the whole answer.
        num_tokens: its tokens.
        seconds: how long it took.
        finish_reason: ``stop``, ``length`` or ``stop_string``.
        forgot: whether the oldest turns no longer fit beside it, for the first time.
    """

    text: str
    num_tokens: int
    seconds: float
    finish_reason: str
    forgot: bool


class Chat:
    """Asks one model or two the same questions.

    Attributes:
        speakers: the models, the base first.
        is_conversation: whether turns are remembered; else each question stands alone.
    """

    def __init__(
        self,
        asked: AskedModel,
        wording: Wording,
        speakers: list[Speaker],
        settings: EvaluationSettings,
        *,
        template: str | None,
        system: str | None,
    ) -> None:
        """Begin without turns.

        Args:
            asked: the tuned model.
            wording: how it is asked.
            speakers: the models.
            settings: device and dtypes.
            template: of the training rows' prompts; ``None`` without one.
            system: what stands before all questions; ``None`` for nothing.

        Raises:
            UserError: a system message, and a model that was tuned on running text.
        """
        self.speakers = speakers
        self.is_conversation = wording.holds_conversations(asked.tokenizer)
        self._asked, self._wording, self._settings = asked, wording, settings
        self._template, self._system = template, system
        self._has_forgotten = False
        self._num_asked = 0
        self._question = ""
        self._num_turns: list[int] = []
        # That of running text makes whole texts, and what is typed is the beginning of one.
        columns = template_columns(template) if template and wording.tuned_on != TEXT else []
        self._column = columns[0] if len(columns) == 1 else None
        self._mapping = self._choose_mapping()
        if system and self._mapping.format == TEXT:
            raise UserError("--system: the model was tuned on running text, which has no system message. Leave it out.")

    def describe(self) -> list[str]:
        """Describe how questions are put, a line each."""
        lines = [f"{speaker.name}: {self._name_of(speaker)}" for speaker in self.speakers]
        if self.is_conversation:
            if self._template:
                lines.append(
                    f"It was tuned on prompts of this wording, and answers best what has it: {self._template!r}"
                )
            return lines
        if self._mapping.format == TEXT:
            how = "it goes on with the text that you type, as it was tuned on running text"
        elif self._mapping.template:
            how = f"what you type goes into the template that it was tuned with: {self._template!r}"
        elif self._template:
            how = f"type the whole prompt, in the wording that it was tuned with: {self._template!r}"
        else:
            how = "what you type is the whole prompt"
        why = "An encoder-decoder" if self._wording.reads_apart else "Without a chat template the model"
        return [*lines, f"{why} answers each prompt by itself and remembers none: {how}."]

    def reset(self) -> None:
        """Forget all turns."""
        for speaker in self.speakers:
            speaker.turns.clear()
        self._has_forgotten = False

    def ask(self, question: str) -> None:
        """Begin a turn, before each speaker is let reply to it.

        Args:
            question: what was typed.
        """
        self._num_asked += 1
        self._question = question
        self._num_turns = [len(speaker.turns) for speaker in self.speakers]

    def take_back(self) -> None:
        """Forget the question that was asked last, and what was replied to it: all speakers remember the same turns."""
        for speaker, num_turns in zip(self.speakers, self._num_turns, strict=True):
            del speaker.turns[num_turns:]

    def reply(self, speaker: Speaker, write: Callable[[str], object]) -> Reply:
        """Let one model answer the question; only a whole answer is remembered.

        Args:
            speaker: one of the speakers.
            write: gets each new part of the text.

        Raises:
            UserError: the question cannot be put, such as by a chat template that refuses it.
        """
        prompt, has_forgotten = self._prompt_of(speaker)
        began = time.monotonic()
        with speaker.as_itself(), autocast(self._settings.device, self._settings.compute_dtype):
            answer, text = stream_answer(speaker.model, prompt, speaker.answering, turn=self._num_asked, write=write)
        seconds = time.monotonic() - began
        if self.is_conversation:
            speaker.turns += [{"role": "user", "content": self._question}, {"role": "assistant", "content": text}]
        forgot = has_forgotten and not self._has_forgotten
        self._has_forgotten |= has_forgotten
        return Reply(text, len(answer.ids), seconds, answer.finish_reason, forgot)

    def _name_of(self, speaker: Speaker) -> str:
        base = self._asked.tuning["base"]["name_or_path"]
        return base if speaker.name == "base" else f"{self._asked.folder} ({self._asked.tuning['method']} of {base})"

    def _choose_mapping(self) -> ColumnMapping:
        if self.is_conversation:
            return ColumnMapping(MESSAGES, {"messages": "messages"})
        system = {"system": "system"} if self._system else {}
        format, part = (TEXT, "text") if self._wording.tuned_on == TEXT else (PROMPT_RESPONSE, "prompt")
        # More columns than one cannot be typed in a line: then the whole prompt is.
        if self._column is not None:
            return ColumnMapping(format, system, self._template)
        return ColumnMapping(format, {part: part, **system})

    def _row_of(self, speaker: Speaker) -> Row:
        if not self.is_conversation:
            name = self._column or ("text" if self._mapping.format == TEXT else "prompt")
            return {name: self._question, "system": self._system}
        first: list[Cell] = [{"role": "system", "content": self._system}] if self._system else []
        return {"messages": [*first, *speaker.turns, {"role": "user", "content": self._question}]}

    def _prompt_of(self, speaker: Speaker) -> tuple[list[int], bool]:
        """Return the tokens of a question with what was said before, and whether the oldest of it had to go."""
        counts = SplitCounts()
        try:
            example = prompt_reader(self._mapping, normalize=True)(self._row_of(speaker))
        except RowProblem as problem:
            raise UserError(f"This cannot be asked: {problem.reason}") from problem
        with PromptTokenizer(self._asked.tokenizer, self._wording, self._mapping) as prompts:
            tokenized = prompts.tokenize([(self._num_asked, example)], counts)
        if not tokenized:
            reason = next(reason for reason in DROPPED if counts.counts[reason])
            detail = counts.detail(reason, self._num_asked)
            raise UserError(f"This cannot be asked ({DROPPED[reason]}){f': {detail}' if detail else '.'}")
        return tokenized[0].input_ids, bool(counts.counts["old_turns_dropped"])


def open_chat(
    tuned_folder: Path, parameters: Parameters, *, who: str, system: str | None, max_new_tokens: int | None
) -> Chat:
    """Load the models and begin a conversation.

    Args:
        tuned_folder: adapter or full weights with their ``tuning.json``.
        parameters: of the environment; ``generate.generation`` says how answers are made.
        who: ``tuned``, ``base`` or ``both``.
        system: what stands before all questions; ``None`` for nothing.
        max_new_tokens: longest answer; ``None`` for that of ``generate.generation``.

    Raises:
        UserError: the tuned model or its base cannot be read, it is a classifier, or answers do not fit into it.
    """
    generation = parameters.generate.generation
    if max_new_tokens is not None:
        generation = generation.model_copy(update={"max_new_tokens": max_new_tokens})
    asked = find_asked_model(tuned_folder)
    key = "generate.generation.max_new_tokens" if max_new_tokens is None else "--max-new-tokens"
    check_answer_room(asked.config, max_new_tokens=generation.max_new_tokens, key=key, instead="")
    seed = parameters.seed if generation.seed is None else generation.seed
    settings = choose_settings(tuned_folder, EvaluateParameters(), parameters.model, parameters.environment, seed=seed)
    check_bits(parameters.generate.quantization, settings)
    wording = read_wording(
        asked.tuning, asked.tokenizer, asked.config, parameters.tokenize, max_new_tokens=generation.max_new_tokens
    )
    reference_ids = _reference_ids(asked, wording)
    speakers = []
    for name, model, as_itself in _load(asked, settings, who, parameters.generate.quantization):
        ends = find_ends(asked, model, name=name, reference_ids=reference_ids)
        answering = Answering(asked.tokenizer, generation, ends, settings.device, seed)
        speakers.append(Speaker(name, model, answering, as_itself))
    template = as_trained(parameters.data).template
    return Chat(asked, wording, speakers, settings, template=template, system=system)


def _load(
    asked: AskedModel, settings: EvaluationSettings, who: str, quantization: QuantizationName
) -> list[tuple[str, Any, Callable[[], AbstractContextManager[Any]]]]:
    """Load one model for both where the tuned one is an adapter, which is switched off for the base."""
    names = ("base", "tuned") if who == "both" else (who,)
    if who != "both" or asked.tuning["method"] == "full":
        return [
            (name, load_asked(asked, settings, name=name, quantization=quantization), nullcontext) for name in names
        ]
    model = load_asked(asked, settings, name="tuned", quantization=quantization, merges=False)
    return [("base", model, model.disable_adapter), ("tuned", model, nullcontext)]


def _reference_ids(asked: AskedModel, wording: Wording) -> list[int]:
    """Return the tokens of an answer as a training row has it, its end included."""
    format = PROMPT_RESPONSE if wording.tuned_on != TEXT else TEXT
    mapping = ColumnMapping(format, {"text": "text"} if format == TEXT else {"prompt": "prompt"})
    example = prompt_reader(mapping, normalize=True)({"text": "Hello", "prompt": "Hello"})
    with PromptTokenizer(asked.tokenizer, wording, mapping) as prompts:
        [tokenized] = prompts.tokenize([(1, example)], SplitCounts())
    return tokenized.reference_ids
