"""Write figures, paths and text from rows as a reader of a report wants them: safe, plain to see, and short."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from lm_tuning.wording import escape_signs, escape_start, on_one_line

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
    """Write a figure of both models as a line.

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
    """Remove the lines that all prompts begin and end with: the template's, and a fixed instruction.

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


def write_count(number: int) -> str:
    """Write an integer with commas.

    Args:
        number: any size.
    """
    return f"{number:,}"


def write_large(number: float) -> str:
    """Write a number with three digits and a letter for thousands, millions or billions.

    Args:
        number: not negative.
    """
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:,.0f}"


def write_percent(fraction: float) -> str:
    """Write a share so that little is not taken for nothing, nor almost all for all.

    Args:
        fraction: from 0 to 1.
    """
    if 0 < fraction < 0.0005:
        return "< 0.1%"
    if 0.9995 <= fraction < 1:
        return "> 99.9%"
    return f"{fraction:.1%}"


def shorten_path(path: str) -> str:
    """Keep the last parts of a long path.

    Args:
        path: a file.
    """
    parts = PurePath(path).parts
    return path if len(parts) <= 4 else "/".join(("…", *parts[-3:]))


# Control characters, and those that turn the direction of what follows or take no room.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
# A setting of ours, such as train.batching=packed, but no file, such as train.csv.
PARAMETER = re.compile(
    r"(?<![\w./\\-])(?:data|split|tokenize|train|evaluate|model|preflight)\."
    r"(?!(?:csv|tsv|jsonl?|parquet|arrow|txt|md|html|png|zip|gz|zst|xz|bz2)\b)"
    r"[a-z_]+(?:\.[a-z_]+)*(?:[:=] ?[a-z0-9_.]*[a-z0-9_])?\b"
)


def show_unseen(text: str) -> str:
    r"""Write characters without a shape as ``\u200b``; line breaks and tabs stay.

    Args:
        text: what stands in a row.
    """
    return _UNSEEN.sub(lambda found: f"\\u{ord(found.group()):04x}", text.replace("\r\n", "\\r\n"))


def shorten_middle(text: str, max_characters: int) -> str:
    """Cut a long text in the middle and say how much is missing.

    Args:
        text: any text.
        max_characters: characters to keep.
    """
    if len(text) <= max_characters:
        return text
    end = max_characters // 3
    start = max_characters - end
    return f"{text[:start]} … {len(text) - max_characters:,} characters … {text[-end:]}"


def escape_markdown(text: str) -> str:
    """Write plain text for Markdown, on one line; names of parameters become code.

    Args:
        text: plain text, perhaps with words out of rows in it.
    """
    line = on_one_line(show_unseen(text))
    parts, at = [], 0
    for found in PARAMETER.finditer(line):
        parts += [escape_signs(line[at : found.start()]), f"`{found.group()}`"]
        at = found.end()
    return escape_start("".join([*parts, escape_signs(line[at:])]))
