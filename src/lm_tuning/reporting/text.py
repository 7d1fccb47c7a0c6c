"""Shape numbers and texts for the reports of an evaluation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PROMPT_CHARACTERS = 400
ANSWER_CHARACTERS = 400
TERMINAL_CHARACTERS = 200
TERMINAL_SAMPLES = 3


@dataclass(frozen=True)
class Line:
    """One quantity of the table, ready to print.

    Attributes:
        name: quantity and unit.
        base: value of the base model.
        tuned: value of the tuned model.
        change: what tuning changed.
    """

    name: str
    base: str
    tuned: str
    change: str


@dataclass(frozen=True)
class Block:
    """A table below the figures.

    Attributes:
        title: what it shows.
        columns: their titles; all but the text columns hold numbers.
        rows: one text for each column.
        num_text_columns: how many of the first columns hold text.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    num_text_columns: int = 1


def compare(result: dict[str, Any], key: str, name: str, *, decimals: int = 4, as_difference: bool = False) -> Line:
    """Put a figure of both models into a line.

    Args:
        result: what ``evaluate_models`` gives as ``result``.
        key: of the figure, under ``base`` and ``tuned``.
        name: quantity and unit.
        decimals: shown of each value.
        as_difference: whether the change is a difference, or a share of the base's value.
    """
    improvement = result["improvement"]
    change = difference(improvement[f"{key}_difference"]) if as_difference else percent(improvement[f"{key}_fraction"])
    return Line(name, number(result["base"][key], decimals), number(result["tuned"][key], decimals), change)


def shorten(text: str, max_characters: int) -> str:
    """Cut a long text in the middle, since both its start and its end tell what it is.

    Args:
        text: any text.
        max_characters: most characters of the result, at least 2.
    """
    if len(text) <= max_characters:
        return text
    end = max_characters // 3
    return text[: max_characters - end - 1] + "…" + text[-end:]


def split_shared(prompts: Sequence[str]) -> tuple[str, list[str], str]:
    """Take off the lines that all prompts begin and end with: the template's, and a fixed instruction.

    Args:
        prompts: decoded prompts.

    Returns:
        The shared start and end, in whole lines, and what lies between them in each prompt. Nothing is shared by a
        single prompt.
    """
    if len(set(prompts)) < 2:
        return "", list(prompts), ""
    start = _whole_lines(os.path.commonprefix(list(prompts)))
    rests = [prompt[len(start) :] for prompt in prompts]
    ending = _whole_lines(os.path.commonprefix([rest[::-1] for rest in rests]))[::-1]
    return start, [rest[: len(rest) - len(ending)] for rest in rests], ending


def number(value: float | None, digits: int) -> str:
    """Show a number, a dash where there is none."""
    return "–" if value is None else f"{value:,.{digits}f}"  # noqa: RUF001


def percent(improvement: float | None) -> str:
    """Show a fall of a quantity as a negative change, with as many digits as it takes to see a small one."""
    return "–" if improvement is None else _signed(-100 * improvement, 1) + "%"  # noqa: RUF001


def difference(value: float | None) -> str:
    """Show a difference with its sign, with as many digits as it takes to see a small one."""
    return "–" if value is None else _signed(value, 4)  # noqa: RUF001


def _signed(value: float, decimals: int) -> str:
    """Write a change with its sign; what is 0 with three more digits has none."""
    for shown in range(decimals, decimals + 4):
        if round(value, shown):
            return f"{value:+.{shown}f}"
    return f"{0:.{decimals}f}"


def _whole_lines(text: str) -> str:
    """Cut a text after its last line break."""
    return text[: text.rfind("\n") + 1]
