"""Cut texts into what ROUGE counts, in any script."""

from __future__ import annotations

import functools
import re
import unicodedata
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Protocol

from lm_tuning.errors import UserError
from lm_tuning.parameters.scores import RougeTokenizer

_ASCII_WORD = re.compile(r"[a-z0-9]+")

# Scripts written without spaces between words: Han, kana, Thai, Lao, Myanmar, Khmer. Each letter counts as a word,
# since a sentence that counted as one would match wholly or not at all.
_SPACELESS_RANGES = (
    (0x0E00, 0x0EFF),
    (0x1000, 0x109F),
    (0x1780, 0x17FF),
    (0x3005, 0x3007),
    (0x3040, 0x30FF),
    (0x31F0, 0x31FF),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0xFF66, 0xFF9F),
    (0x20000, 0x323AF),
)


class Tokenizer(Protocol):
    """What ROUGE cuts texts with.

    Attributes:
        signature: its name and version; what it makes of a text changes with no other.
    """

    signature: str

    def tokenize(self, text: str) -> list[str]:
        """Return the parts of a text that are counted."""


def normalize(text: str) -> str:
    """Return a text in one form for each letter, in lower case: what every tokenizer here begins with.

    Args:
        text: any text; decomposed Hangul or accents would be other words than composed ones.
    """
    return unicodedata.normalize("NFC", text).lower()


class MultilingualTokenizer:
    """Split a text into lower-case words of letters, digits and marks.

    For ASCII text the words are those of rouge_score's own tokenizer, which drops every other letter and so
    scores 0 for most of the world's languages.
    """

    signature = "multilingual.1"

    def tokenize(self, text: str) -> list[str]:
        """Return the words of a text.

        Args:
            text: any text; composed and decomposed letters count as the same.
        """
        # One form for each letter first: decomposed Hangul or accents would be other words than composed ones.
        text = normalize(text)
        if text.isascii():
            return _ASCII_WORD.findall(text)
        words: list[str] = []
        joins_letter = joins_mark = False
        for character in text:
            category = unicodedata.category(character)[0]
            # A mark (an accent, a vowel sign) belongs to the letter before it, in spaceless scripts too.
            if category == "M":
                if joins_mark:
                    words[-1] += character
            elif category in "LN":
                stands_alone = _is_spaceless(character)
                if joins_letter and not stands_alone:
                    words[-1] += character
                else:
                    words.append(character)
                joins_letter, joins_mark = not stands_alone, True
            else:
                joins_letter = joins_mark = False
        return words


class WhitespaceTokenizer:
    """Split a text at white space; punctuation stays at its word."""

    signature = "whitespace.1"

    def tokenize(self, text: str) -> list[str]:
        """Return what stands between white space."""
        return normalize(text).split()


class CharacterTokenizer:
    """Split a text into characters, white space left out: Hangul into syllables, whatever ending a word has."""

    signature = "characters.1"

    def tokenize(self, text: str) -> list[str]:
        """Return the characters."""
        return [character for character in normalize(text) if not character.isspace()]


class KoreanMorphemeTokenizer:
    """Split a Korean text into morphemes by kiwipiepy, so that a noun counts whatever particle it carries."""

    def __init__(self) -> None:
        """Load its model.

        Raises:
            UserError: kiwipiepy is not installed.
        """
        check_tokenizer("korean_morphemes")
        self._kiwi = _load_kiwi()
        self.signature = f"korean_morphemes-kiwipiepy-{version('kiwipiepy')}"

    def tokenize(self, text: str) -> list[str]:
        """Return the forms of the morphemes, punctuation among them."""
        return [token.form for token in self._kiwi.tokenize(normalize(text))]


# Its model takes a second to load.
@functools.cache
def _load_kiwi() -> Any:
    from kiwipiepy import Kiwi

    # With one thread: texts are handed over one by one, so more of them would only wait.
    return Kiwi(num_workers=1)


def check_tokenizer(name: RougeTokenizer) -> None:
    """Refuse a tokenizer whose package is not installed.

    Args:
        name: value of ``evaluate.scores.rouge_tokenizer``.

    Raises:
        UserError: it is not.
    """
    if name == "korean_morphemes" and find_spec("kiwipiepy") is None:
        raise UserError(
            "evaluate.scores.rouge_tokenizer = korean_morphemes needs the package kiwipiepy, which is not installed. "
            "Install it with: pip install 'lm-tuning[korean]' (in this folder: pip install -e '.[korean]'), or set "
            "multilingual, whitespace or characters, which need no package."
        )


def make_tokenizer(name: RougeTokenizer) -> Tokenizer:
    """Return a tokenizer by its name.

    Args:
        name: value of ``evaluate.scores.rouge_tokenizer``.

    Raises:
        UserError: its package is not installed.
    """
    makers: dict[RougeTokenizer, type[Tokenizer]] = {
        "multilingual": MultilingualTokenizer,
        "whitespace": WhitespaceTokenizer,
        "characters": CharacterTokenizer,
        "korean_morphemes": KoreanMorphemeTokenizer,
    }
    return makers[name]()


def _is_spaceless(character: str) -> bool:
    # Latin, Greek, Cyrillic, Arabic and the scripts of India lie below the first range and need no search.
    code = ord(character)
    return code >= _SPACELESS_RANGES[0][0] and any(first <= code <= last for first, last in _SPACELESS_RANGES)
