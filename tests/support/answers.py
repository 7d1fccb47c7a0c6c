"""Let a model answer by flat settings, where a test is about the tokens alone."""

from __future__ import annotations

from typing import Any

from lm_tuning.generation.generate import generate_answers
from lm_tuning.parameters.generation import GenerationParameters


def take_generation(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with those of ``generation`` gathered in one group."""
    names = GenerationParameters.model_fields.keys() - {"seed"}
    chosen = {name: value for name, value in options.items() if name in names}
    others = {name: value for name, value in options.items() if name not in names}
    return {"generation": GenerationParameters(**chosen), **others}


def answer_ids(model: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """Return the token ids of each answer."""
    return [answer.ids for answer in generate_answers(model, prompts, **take_generation(options))]


def cut_at(tokens: list[int], stop_ids: list[int]) -> list[int]:
    """Return the tokens before the first stop token."""
    return tokens[: next((index for index, token in enumerate(tokens) if token in stop_ids), len(tokens))]
