"""How a tuned model is to be asked: in the wording of the rows that it was tuned on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lm_tuning.data.example import example_settings, is_example
from lm_tuning.data.format.columns import SEQ2SEQ_LM, TEXT
from lm_tuning.models.record import TuningRecord
from lm_tuning.models.structure import longest_text, position_limit
from lm_tuning.parameters.data import ColumnParameters, DataParameters, TokenizeParameters
from lm_tuning.text.tokenizers.base import TaskTokenizer
from lm_tuning.text.tokenizers.causal_lm import RowTokenizer
from lm_tuning.text.tokenizers.seq2seq import PairTokenizer

NO_LIMIT = 1 << 30
"""Tokens of a prompt where the model names no limit."""


@dataclass(frozen=True)
class Wording:
    """How prompts are written for a model.

    Attributes:
        task: ``causal_lm`` or ``seq2seq_lm``.
        tuned_on: format of the rows that it was tuned on; ``None`` where its record does not say.
        settings: the ``tokenize`` parameters, but for what was recorded while training.
        room: tokens that a prompt may have.
    """

    task: str
    tuned_on: str | None
    settings: TokenizeParameters
    room: int

    @property
    def reads_apart(self) -> bool:
        """Whether the model is an encoder-decoder, which reads a prompt by itself."""
        return self.task == SEQ2SEQ_LM

    def holds_conversations(self, tokenizer: Any) -> bool:
        """Return whether the model answers turn after turn: it has a chat template and was not tuned without it.

        Args:
            tokenizer: of the tuned model.
        """
        return not self.reads_apart and self.tuned_on != TEXT and bool(tokenizer.chat_template)

    def tokenizer_of(self, tokenizer: Any, format: str) -> TaskTokenizer:
        """Return what turns rows of a format into tokens, as the training rows were.

        Args:
            tokenizer: of the tuned model; must not be used elsewhere inside its ``with`` block.
            format: ``text``, ``prompt_response`` or ``messages``.

        Raises:
            UserError: the format needs a chat template, and there is none.
        """
        if self.reads_apart:
            return PairTokenizer(tokenizer, self.settings)
        settings = self.settings
        if format == TEXT or not tokenizer.chat_template:
            settings = settings.model_copy(update={"template_arguments": {}})
        if format == TEXT:
            # It would lose its end, where the answer goes on: whoever cuts it takes the beginning.
            settings = settings.model_copy(update={"max_length_tokens": NO_LIMIT})
        return RowTokenizer(tokenizer, settings, format)


def read_wording(
    tuning: TuningRecord, tokenizer: Any, config: Any, tokenize: TokenizeParameters, *, max_new_tokens: int
) -> Wording:
    """Read off the record of a training how the model is to be asked.

    Args:
        tuning: how the model was made.
        tokenizer: its tokenizer.
        config: of transformers, its positions.
        tokenize: the ``tokenize`` parameters, for what an earlier version did not record.
        max_new_tokens: longest answer, for which a prompt leaves room.
    """
    rendering, task = tuning["rendering"], tuning["task"]
    positions = position_limit(config)
    if task == SEQ2SEQ_LM:
        # Without a table of positions it reads at least what it was tuned on.
        room = positions or max(longest_text(tokenizer) or 0, tokenize.max_length_tokens)
    else:
        # Prompt and answer share the positions.
        room = NO_LIMIT if positions is None else positions - max_new_tokens
    recorded = {
        "template_arguments": rendering.get("template_arguments", tokenize.template_arguments),
        "system_turn": rendering.get("system_turn", tokenize.system_turn),
        "control_tokens": rendering.get("control_tokens", tokenize.control_tokens),
    }
    settings = tokenize.model_copy(
        update={
            **recorded,
            "max_length_tokens": room,
            "max_target_tokens": NO_LIMIT,
            "truncation": "truncate_prompt",
            "loss_on": "completion",  # the placeholder alone, at which the prompt is cut off
            "on_altered_content": "warn",
        }
    )
    return Wording(task=task, tuned_on=rendering.get("format"), settings=settings, room=room)


def as_trained(data: DataParameters) -> DataParameters:
    """Return the ``data`` parameters with the columns and the template that the training rows were read by.

    Args:
        data: the parameters, which leave out what the example knows of itself.
    """
    if not is_example(data.path):
        return data
    columns, template, _ = example_settings(data.columns.model_dump(), data.template, None)
    return data.model_copy(update={"columns": ColumnParameters(**columns), "template": template})
