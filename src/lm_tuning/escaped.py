"""Find a known text in whatever form it was written: as it is, or escaped for code, pages, addresses or a shell."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from itertools import groupby

# A letter or digit before a text makes it part of another word, unless it ends an escape, as the n of "\n" does.
_BEFORE = r"(?:(?<![A-Za-z0-9])|(?<=%[0-9A-Fa-f]{2})|(?<=\\[abfnrtv])|(?<=\\x[0-9A-Fa-f]{2})|(?<=\\u[0-9A-Fa-f]{4}))"
_AFTER = r"(?![A-Za-z0-9])"
# What the forms of a character begin with that is no letter or digit, beside the character itself.
_STARTS = "\\%&+' ↵"
# Each level of quoting doubles the backslashes before a character.
_BACKSLASHES = 8
_SHORT = {"\n": "n", "\r": "r", "\t": "t"}


def find_forms(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that finds these texts, escaped or not, where they stand by themselves; None without any.

    Args:
        texts: none of them empty.
    """
    longest_first = sorted(set(texts), key=len, reverse=True)
    if not longest_first:
        return None
    starts = {text[0] for text in longest_first}
    if not all(map(_is_plain, starts)):
        starts.update(_STARTS)
    first = "".join(map(re.escape, sorted(starts)))
    patterns = ("".join(_forms_of(one, len(list(run))) for one, run in groupby(text)) for text in longest_first)
    return re.compile(f"(?=[{first}]){_BEFORE}(?:{'|'.join(patterns)}){_AFTER}")


def _is_plain(character: str) -> bool:
    return character.isascii() and character.isalnum()


def _forms_of(character: str, count: int) -> str:
    """Return a pattern for a character that stands ``count`` times in a row."""
    if _is_plain(character):
        return character * count
    if character == "\\":  # as a run, since each level of quoting doubles all of it
        return rf"(?:\\{{{count},{count * _BACKSLASHES}}}|(?:%5[Cc]){{{count}}})"
    code, escape = ord(character), rf"\\{{1,{_BACKSLASHES}}}"
    units = character.encode("utf-16-be", "surrogatepass")
    forms = [
        rf"\\{{0,{_BACKSLASHES}}}{re.escape(character)}",
        "".join(f"{escape}u(?i:{units[at : at + 2].hex()})" for at in range(0, len(units), 2)),
        f"{escape}U(?i:{code:08x})",
        "".join(f"%(?i:{byte:02x})" for byte in character.encode("utf-8", "surrogatepass")),
        f"&#(?:0*{code}|[xX]0*(?i:{code:x}));",
        re.escape(html.escape(character)),
    ]
    if code < 256:
        forms.append(f"{escape}x(?i:{code:02x})")
    if character in _SHORT:
        forms.append(f"{escape}{_SHORT[character]}")
    if character == "\n":
        forms.append(r" ?↵[ \n]")  # as reports show it
    if character == " ":
        forms.append(r"\+")
    if character == "'":
        forms.append("'\"'\"'")  # as a shell quotes it
    repeated = f"{{{count}}}" if count > 1 else ""
    return f"(?:{'|'.join(forms)}){repeated}"
