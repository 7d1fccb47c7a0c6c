"""Tell what is wrong with an answer by its text alone: empty, copied, in another script, repeating itself."""

from __future__ import annotations

import unicodedata
from collections import Counter
from functools import lru_cache

EMPTY = "empty"
EXACT = "equal to the reference"
CUT_OFF = "cut off at the longest answer"
COPIED = "copied from the prompt"
OTHER_SCRIPT = "in another script than the reference"
REPEATING = "repeats itself"
LONGER = "over twice as long as the reference"
SHORTER = "less than half as long as the reference"
KINDS = (EXACT, EMPTY, CUT_OFF, COPIED, OTHER_SCRIPT, REPEATING, LONGER, SHORTER)
"""In the order of the report."""

RULES = {
    COPIED: "80 % of its stretches of 12 characters are in the prompt, and less than half of the reference's",
    OTHER_SCRIPT: "most of its letters are of another script than most of the reference's",
    REPEATING: "fewer than half of its stretches of 12 characters are different ones",
    CUT_OFF: "generation ended at evaluate.generation.max_new_tokens",
}
"""How those are recognised that do not go without saying."""

# Stretches of characters and not of words, so that scripts without spaces are judged alike.
_STRETCH = 12
_MIN_STRETCHES = 12
_MIN_LETTERS = 4

# Names of characters begin with their script. These are written together.
_JOINED = {"HIRAGANA": "CJK", "KATAKANA": "CJK", "KATAKANA-HIRAGANA": "CJK", "IDEOGRAPHIC": "CJK"}
_WIDTHS = ("FULLWIDTH", "HALFWIDTH", "MODIFIER", "SUPERSCRIPT", "SUBSCRIPT", "MATHEMATICAL")


def kinds_of(prompt: str, reference: str, answer: str, *, finish_reason: str | None = None) -> list[str]:
    """List what an answer is.

    Args:
        prompt: what was asked.
        reference: the true answer.
        answer: that of a model.
        finish_reason: why generation ended, ``length`` at the limit; None where it is not known.

    Returns:
        Some of ``KINDS``; nothing for an answer of the usual kind.
    """
    answer, reference = answer.strip(), reference.strip()
    if not answer:
        return [EMPTY] if reference else [EXACT]
    if answer == reference:
        return [EXACT]
    found = []
    if finish_reason == "length":
        found.append(CUT_OFF)
    if _is_copied(prompt, reference, answer):
        found.append(COPIED)
    theirs, ours = script_of(answer), script_of(reference)
    if theirs and ours and theirs != ours:
        found.append(OTHER_SCRIPT)
    if _repeats(answer) and not _repeats(reference):
        found.append(REPEATING)
    if len(answer) > 2 * len(reference):
        found.append(LONGER)
    elif 2 * len(answer) < len(reference):
        found.append(SHORTER)
    return found


def script_of(text: str) -> str | None:
    """Return the script that most letters of a text are of, such as ``LATIN`` or ``HANGUL``.

    Args:
        text: any text.

    Returns:
        None with fewer than four letters, or where no script has more than half of them. Chinese characters and kana
        count as one.
    """
    counts = Counter(_script(character) for character in text if character.isalpha())
    num_letters = sum(counts.values())
    if num_letters < _MIN_LETTERS:
        return None
    script, most = counts.most_common(1)[0]
    return script if 2 * most > num_letters else None


@lru_cache(maxsize=20_000)
def _script(letter: str) -> str:
    words = unicodedata.name(letter, "UNKNOWN").split()
    word = next((word for word in words if word not in _WIDTHS), words[0])
    return _JOINED.get(word, word)


def _is_copied(prompt: str, reference: str, answer: str) -> bool:
    in_prompt = set(_stretches(prompt))
    ours = _stretches(answer)
    if len(ours) < _MIN_STRETCHES or not in_prompt:
        return False
    # A task may be to copy, as extracting a passage is; then the reference is copied too.
    return _share_in(ours, in_prompt) >= 0.8 and _share_in(_stretches(reference), in_prompt) < 0.5


def _repeats(text: str) -> bool:
    stretches = _stretches(text)
    return len(stretches) >= 2 * _STRETCH and 2 * len(set(stretches)) < len(stretches)


def _stretches(text: str) -> list[str]:
    """Return every run of 12 characters of a text, in small letters and without differences of space."""
    text = " ".join(text.casefold().split())
    return [text[start : start + _STRETCH] for start in range(len(text) - _STRETCH + 1)]


def _share_in(stretches: list[str], known: set[str]) -> float:
    return sum(stretch in known for stretch in stretches) / len(stretches) if stretches else 0.0
