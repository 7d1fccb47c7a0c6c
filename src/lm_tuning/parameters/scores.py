"""Parameters of the scores that answers get: which ones, and how texts are cut and compared."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from lm_tuning.parameters.base import ParameterGroup, PathText

ScoreName = Literal[
    "rouge_1",
    "rouge_2",
    "rouge_l",
    "rouge_l_sum",
    "rouge_sum",
    "bleu",
    "chrf",
    "exact_match",
    "json_valid",
    "json_schema",
]
RougeTokenizer = Literal["multilingual", "whitespace", "characters", "korean_morphemes"]
BleuTokenizer = Literal["13a", "intl", "zh", "char", "none"]
Normalizer = Literal["whitespace", "casefold", "punctuation", "articles", "number"]

ANSWER_PATTERNS = {"gsm8k": r"####\s*(-?[$€£]?\s*[\d.,]*\d)", "last_number": r"(-?\d(?:[\d,]*\d)?(?:\.\d+)?)"}
"""Patterns that have a name. ``last_number`` takes its last match, every other pattern its first."""


def _check_pattern(pattern: str) -> str:
    try:
        compiled = re.compile(ANSWER_PATTERNS.get(pattern, pattern))
    except re.error as error:
        raise ValueError(f"it is no regular expression ({error})") from error
    if compiled.groups != 1:
        raise ValueError(
            f"it has {compiled.groups} groups, and needs exactly one, around the answer; write (?:…) for others. "
            f"Patterns with a name are {' and '.join(ANSWER_PATTERNS)}"
        )
    return pattern


AnswerPattern = Annotated[str, Field(min_length=1), AfterValidator(_check_pattern)]
DottedName = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$",
        json_schema_extra={"x-words": "the dotted name of a Python function, such as my_package.metrics.score"},
    ),
]


class ScoreParameters(ParameterGroup):
    """Which scores the answers get, and how; the page "Scores" defines every one."""

    names: list[ScoreName] = Field(default=["rouge_l", "rouge_1", "rouge_2"])
    """Scores of the answers; the first of them is the one that the verdict is about."""

    rouge_tokenizer: RougeTokenizer = "multilingual"
    """What ROUGE counts: words, with single letters of scripts without spaces (multilingual); what stands between
    spaces; characters; or Korean morphemes, which need the package kiwipiepy."""

    bleu_tokenizer: BleuTokenizer = "13a"
    """Tokenizer of sacrebleu for BLEU."""

    chrf_word_order: Literal[0, 1, 2] = 0
    """Longest run of words that chrF counts beside characters; 2 makes it chrF++."""

    normalizers: list[Normalizer] = Field(default=["whitespace"])
    """What exact match overlooks, applied in this order to reference and answer; an empty list overlooks nothing."""

    answer_pattern: AnswerPattern | None = None
    """What exact match compares of reference and answer: gsm8k (the number after ####), last_number, or a regular
    expression with one group, whose first match counts; null compares the whole text."""

    json_schema_path: PathText | None = None
    """File of the JSON schema that the score json_schema checks answers against."""

    own_metrics: list[DottedName] = Field(default=[])
    """Scores of your own, as dotted names of Python functions; each is called with references, answers and rows."""

    @model_validator(mode="after")
    def _check_together(self) -> ScoreParameters:
        """Refuse settings that nothing reads, and a score that lacks one."""
        problems = []
        lists: dict[str, list[str]] = {
            "names": [*self.names],
            "normalizers": [*self.normalizers],
            "own_metrics": self.own_metrics,
        }
        for key, values in lists.items():
            twice = sorted({value for value in values if values.count(value) > 1})
            if twice:
                problems.append(f"{key} holds {', '.join(twice)} more than once")
        if self.answer_pattern is not None and "exact_match" not in self.names:
            problems.append("answer_pattern is read by exact_match alone: add exact_match to names, or set it to null")
        if self.json_schema_path is None and "json_schema" in self.names:
            problems.append("the score json_schema needs the file of a schema: set json_schema_path")
        if self.json_schema_path is not None and "json_schema" not in self.names:
            problems.append("json_schema_path is read by the score json_schema alone: add json_schema to names")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def is_empty(self) -> bool:
        """Whether answers get no score at all."""
        return not self.names and not self.own_metrics
