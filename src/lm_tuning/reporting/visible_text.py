"""Make text from rows safe and plain to see: what has no shape gets one."""

from __future__ import annotations

import re

from lm_tuning.wording import escape_signs, escape_start, on_one_line

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
