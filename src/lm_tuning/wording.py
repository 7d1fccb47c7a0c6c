"""Write counts, and text that is not ours, in messages and reports.

Foreign text is everything that this project did not write itself: rows, labels, paths, tokens, templates, messages of
libraries. It is shown as it is. Only what has no shape, or could drive a terminal, is written as an escape.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

SUPERVISED_MARKS = ("⟦", "⟧")


# Characters that cannot be seen (but for joiners, which emoji and Persian need), that move a cursor, switch colours,
# ring a bell, end a line unseen, or turn the direction of what follows; lone surrogates cannot be encoded at all. Line
# breaks and tabs are ordinary text.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)

_SIBILANT = ("s", "x", "z", "ch", "sh")
_VOWELS = "aeiou"


def count_of(number: int, noun: str, plural: str | None = None) -> str:
    """Write a count with its noun, ``1 class`` or ``1,200 classes``.

    Args:
        number: how many.
        noun: the singular; of several words the last one changes.
        plural: for nouns that do not follow the rules.
    """
    return f"{number:,} {noun_for(number, noun, plural)}"


def noun_for(number: int, noun: str, plural: str | None = None) -> str:
    """Return the form of a noun that goes with a number.

    Args:
        number: how many.
        noun: the singular; of several words the last one changes.
        plural: for nouns that do not follow the rules.
    """
    if number == 1:
        return noun
    if plural is not None:
        return plural
    if noun.endswith(_SIBILANT):
        return f"{noun}es"
    if noun.endswith("y") and noun[-2:-1] not in _VOWELS:
        return f"{noun[:-1]}ies"
    return f"{noun}s"


def unit_for(number: int, plural: str) -> str:
    """Return the form of a unit that goes with a number: ``row`` or ``rows``; ``kB`` has one form.

    Args:
        number: how many.
        plural: a noun that follows the rules of `noun_for`.
    """
    if number != 1:
        return plural
    if plural.endswith("ies"):
        return f"{plural[:-3]}y"
    if plural.endswith(("sses", "xes", "ches", "shes")):  # not "sizes" or "phases"
        return plural[:-2]
    return plural.removesuffix("s")


def name_first(names: Sequence[object], most: int) -> str:
    """Write the first of some names, and how many more there are.

    Args:
        names: as they are shown.
        most: how many are written out.
    """
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def visible(text: str) -> str:
    r"""Write control characters as escapes such as ``\u001b``; everything else stays, line breaks and tabs too.

    Args:
        text: foreign text, or a message with foreign text in it.
    """
    return _CONTROLS.sub(lambda found: f"\\u{ord(found.group()):04x}", text.replace("\r\n", "\\r\n"))


def on_one_line(text: str) -> str:
    """Write text on one line: a line break becomes the sign ``↵``, other runs of space one space.

    Args:
        text: foreign text.
    """
    return " ↵ ".join(" ".join(line.split()) for line in text.splitlines() if not line.isspace() and line)


def shorten(text: str, max_characters: int = 40) -> str:
    """Cut the end of a long text; for the middle see :mod:`lm_tuning.reporting.text`.

    Args:
        text: foreign text.
        max_characters: characters that stay.
    """
    return text if len(text) <= max_characters else f"{text[:max_characters]}…"


def write_speed(per_second: float) -> str:
    """Write how many there are in a second, with three digits at least."""
    decimals = 0 if per_second >= 100 else 1 if per_second >= 10 else 2 if per_second >= 1 else 4
    return f"{per_second:,.{decimals}f}"
