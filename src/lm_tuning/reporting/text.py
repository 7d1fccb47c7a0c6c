"""Write figures, paths and text from rows as a reader of a report wants them: safe, plain to see, and short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import PurePath

from lm_tuning.parameters.schema import find_entry
from lm_tuning.reporting.document import Code, Inline, Link, Strong, Words
from lm_tuning.secrets import mask_known
from lm_tuning.wording import on_one_line, visible

NOTHING = "–"  # noqa: RUF001
"""What stands where a figure cannot be said."""

NO_ISSUES = "Nothing stands out."
"""What stands where there are no issues."""

# A setting of ours, such as train.batching=packed, but no file, such as train.csv.
PARAMETER = re.compile(
    r"(?<![\w./\\-])(?:data|split|tokenize|train|evaluate|model|preflight)\."
    r"(?!(?:csv|tsv|jsonl?|parquet|arrow|txt|md|html|png|zip|gz|zst|xz|bz2)\b)"
    r"[a-z_]+(?:\.[a-z_]+)*\b"
)
# After "=" anything is a value. After ":" running text may follow, which begins with a word as a value does.
_ASSIGNED = re.compile(r"= ?[a-z0-9_](?:[a-z0-9_.+-]*[a-z0-9_])?")
_NUMBER_OR_WORD = re.compile(r": ?(-?[0-9](?:[0-9_.,e+-]*[0-9])?(?![\w%])|[a-z][a-z0-9_-]*[a-z0-9](?!\w))")
_LITERALS = {"true", "false", "null"}


def words_of(text: Inline) -> Iterator[Words]:
    """Yield the parts of running text on one line, without characters that cannot be seen.

    Args:
        text: what a block holds. Names of parameters in its plain text become code.
    """
    parts = text if isinstance(text, tuple) else (text,)
    for part in parts:
        if isinstance(part, Strong):
            yield Strong(on_one_line(visible(part.text)))
        elif isinstance(part, Link):
            yield Link(on_one_line(visible(part.text)), part.key)
        elif isinstance(part, Code):
            # A token may be nothing but space, which `on_one_line` would take away.
            shown = visible(part.text)
            yield Code(on_one_line(shown) if shown.strip() else shown.replace("\n", "↵"))
        else:
            line = on_one_line(visible(part))
            if len(parts) > 1:
                # Space at the edges parts words, and `on_one_line` has taken it.
                line = f"{' ' * part[:1].isspace()}{line}{' ' * (bool(line) and part[-1:].isspace())}"
            yield from _set_apart(line)


def _set_apart(line: str) -> Iterator[Words]:
    """Yield plain text with the names of parameters as code."""
    # Foreign text may hold such a name too; set apart it is still shown as it is.
    start = 0
    for found in PARAMETER.finditer(line):
        end = _end_of_value(line, found.group(), found.end())
        yield line[start : found.start()]
        yield Code(line[found.start() : end])
        start = end
    yield line[start:]


def _end_of_value(line: str, name: str, end: int) -> int:
    """Return where the value that is written after a parameter ends, or where the name ends if there is none."""
    assigned = _ASSIGNED.match(line, end)
    if assigned is not None:
        return assigned.end()
    value = _NUMBER_OR_WORD.match(line, end)
    if value is None:
        return end
    word = value.group(1)
    is_value = not word[0].isalpha() or word in _LITERALS or word in _choices_of(name)
    return value.end() if is_value else end


@cache
def _choices_of(name: str) -> frozenset[str]:
    """Return the words that a parameter takes; empty for one that takes any text or that does not exist."""
    entry = find_entry(name.split(".")) or {}
    words: list[object] = []
    for choice in (entry, *entry.get("anyOf", ())):
        words += [*choice.get("enum", ()), choice.get("const")]
    return frozenset(word for word in words if isinstance(word, str))


def reveal(text: str) -> str:
    r"""Write a decoded row so that nothing in it is hidden: joiners without width, too, become ``\u200d``.

    Args:
        text: what stands in a row. Elsewhere joiners stay, since emoji and Persian need them.
    """
    return visible(text).replace("\u200c", "\\u200c").replace("\u200d", "\\u200d")


def keep_ends(text: str, max_characters: int) -> str:
    """Cut a long text in the middle, since both its start and its end tell what it is.

    Args:
        text: any text.
        max_characters: most characters of the result, at least 2.
    """
    # Secrets first, here and below: one that is cut in two is recognised by nobody afterwards.
    text = mask_known(text)
    if len(text) <= max_characters:
        return text
    # More of the start, which says what a text is; the sign in the middle counts too.
    end = max_characters // 3
    return text[: max_characters - end - 1] + "…" + text[-end:]


def shorten_middle(text: str, max_characters: int) -> str:
    """Cut a long text in the middle and say how much is missing.

    Args:
        text: any text.
        max_characters: characters to keep.
    """
    text = mask_known(text)
    if len(text) <= max_characters:
        return text
    end = max_characters // 3
    start = max_characters - end
    return f"{text[:start]} … {len(text) - max_characters:,} characters … {text[-end:]}"


def shorten_path(path: str) -> str:
    """Keep the last parts of a long path.

    Args:
        path: a file.
    """
    parts = PurePath(path).parts
    return path if len(parts) <= 4 else "/".join(("…", *parts[-3:]))


def write_edge(edge: float) -> str:
    """Write the edge of a bin: an integer as it is, a fraction with three digits.

    Args:
        edge: in the unit of the histogram.
    """
    return f"{edge:,}" if isinstance(edge, int) else f"{edge:.3g}"


def write_number(value: float | None, decimals: int) -> str:
    """Write a number, a dash where there is none.

    Args:
        value: any size.
        decimals: digits after the point.
    """
    return NOTHING if value is None else f"{value:,.{decimals}f}"


def write_large(number: float) -> str:
    """Write a number with three digits and a letter for thousands, millions or billions.

    Args:
        number: not negative.
    """
    # Three digits, so that 1,234,567 is 1.23 M; the units of reports are tokens and rows, never bytes.
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:,.0f}"


def write_percent(fraction: float) -> str:
    """Write a share so that little is not taken for nothing, nor almost all for all.

    Args:
        fraction: from 0 to 1.
    """
    # The bounds are where rounding to one decimal would write 0.0 and 100.0.
    if 0 < fraction < 0.0005:
        return "< 0.1%"
    if 0.9995 <= fraction < 1:
        return "> 99.9%"
    return f"{fraction:.1%}"


def write_share(part: float, total: float) -> str:
    """Write a share with two decimals; of nothing it is 0.

    Args:
        part: of the total.
        total: not negative.
    """
    return f"{part / total:.2%}" if total else "0%"


def write_fall(improvement: float | None) -> str:
    """Show a fall of a quantity as a negative change, with as many digits as it takes to see a small one."""
    return NOTHING if improvement is None else _signed(-100 * improvement, 1) + "%"


def write_difference(value: float | None) -> str:
    """Show a difference with its sign, with as many digits as it takes to see a small one."""
    return NOTHING if value is None else _signed(value, 4)


def _signed(value: float, decimals: int) -> str:
    """Write a change with its sign; what is 0 with three more digits has none."""
    # A change of -0.00002 written as -0.0000 would be a sign without a number.
    for shown in range(decimals, decimals + 4):
        if round(value, shown):
            return f"{value:+.{shown}f}"
    return f"{0:.{decimals}f}"
