"""Compare answers with their references whole, or by the part that a pattern finds."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation

from lm_tuning.evaluation.scores.answered import Answered
from lm_tuning.evaluation.statistics.scored_rows import ScoredRows, mean_of_rows
from lm_tuning.parameters.scores import ANSWER_PATTERNS, Normalizer

_ARTICLES = re.compile(r"\b(a|an|the)\b", re.IGNORECASE)
_ASCII_PUNCTUATION = frozenset(string.punctuation)
_SIGNS_BEFORE_NUMBERS = re.compile(r"^[\s$€£¥₩]*(-?)[\s$€£¥₩]*")
_SIGNS_BEHIND_NUMBERS = re.compile(r"[\s%.,]+$")
# Beyond it an exponent would write a number of a million digits.
_MAX_EXPONENT = 1000


def _drop_punctuation(text: str) -> str:
    return "".join(
        character
        for character in text
        # SQuAD drops that of ASCII, signs such as $ and + included; other scripts have theirs.
        if character not in _ASCII_PUNCTUATION and not unicodedata.category(character).startswith("P")
    )


def _plain_number(text: str) -> str:
    """Write a number in one way: ``$1,200.50`` as ``1200.5``; any other text stays."""
    bare = _SIGNS_BEHIND_NUMBERS.sub("", _SIGNS_BEFORE_NUMBERS.sub(r"\1", text)).replace(",", "")
    try:
        number = Decimal(bare)
    except InvalidOperation:
        return text
    if not number.is_finite() or abs(number.adjusted()) > _MAX_EXPONENT:
        return text
    # Not normalize(), which rounds to 28 digits and writes 1E+3.
    written = f"{number:f}"
    written = written.rstrip("0").rstrip(".") if "." in written else written
    return "0" if written in {"-0", ""} else written


_NORMALIZERS: Mapping[Normalizer, Callable[[str], str]] = {
    "whitespace": lambda text: " ".join(text.split()),
    "casefold": str.casefold,
    "punctuation": _drop_punctuation,
    # Each in the place of a space, as SQuAD has it.
    "articles": lambda text: " ".join(_ARTICLES.sub(" ", text).split()),
    "number": _plain_number,
}


class ExactMatch:
    """Share of the answers that equal their references, after normalization.

    Source: the normalizers casefold, punctuation, articles and whitespace together are those of Rajpurkar et al.,
    "SQuAD: 100,000+ Questions for Machine Comprehension of Text", 2016.
    """

    names: Sequence[str] = ("exact_match",)

    def __init__(self, normalizers: Sequence[Normalizer], pattern: str | None) -> None:
        """Keep what is compared.

        Args:
            normalizers: applied one after the other.
            pattern: a key of ``ANSWER_PATTERNS`` or a regular expression with one group; ``None`` for the whole text.
        """
        self._normalizers = tuple(normalizers)
        self._pattern = pattern
        self._compiled = None if pattern is None else re.compile(ANSWER_PATTERNS.get(pattern, pattern))

    @property
    def signature(self) -> str:
        """How answers are compared."""
        pattern = "none" if self._pattern is None else self._pattern
        return f"nrefs:1|norm:nfc{''.join(f'+{name}' for name in self._normalizers)}|pattern:{pattern}|version:1"

    def find(self, text: str) -> str | None:
        """Return what is compared of a text, normalized; ``None`` where the pattern finds nothing.

        Args:
            text: a reference or an answer.
        """
        # Composed and decomposed letters look alike, and no normalizer should be needed to see them so.
        text = unicodedata.normalize("NFC", text)
        if self._compiled is not None:
            found = [match[1] for match in self._compiled.finditer(text) if match[1] is not None]
            if not found:
                return None
            text = found[-1] if self._pattern == "last_number" else found[0]
        for name in self._normalizers:
            text = _NORMALIZERS[name](text)
        return text

    def score(self, rows: Answered) -> dict[str, ScoredRows]:
        """Return the score of one model; an answer without what the pattern asks for is wrong."""
        right = [
            (found := self.find(answer)) is not None and found == self.find(reference)
            for reference, answer in zip(rows.references, rows.answers, strict=True)
        ]
        scored = mean_of_rows(
            "exact_match", right, rows.ids, title="Exact match", unit="0 to 1", signature=self.signature
        )
        return {"exact_match": scored}

    def count_without(self, texts: Sequence[str]) -> int | None:
        """Count the texts in which the pattern finds nothing; ``None`` without a pattern.

        Args:
            texts: answers.
        """
        return None if self._compiled is None else sum(self.find(text) is None for text in texts)

    def rows_without(self, references: Sequence[str]) -> list[int]:
        """Return the indices of the references in which the pattern finds nothing.

        Args:
            references: the true answers.
        """
        return [index for index, reference in enumerate(references) if self.find(reference) is None]
