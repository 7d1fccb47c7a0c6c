"""Score answers by ROUGE, in any script."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class RougeScores:
    """F-measures of answers against their references.

    Attributes:
        rouge_1: mean over all rows of the shared words, 0 to 1; ``None`` without rows.
        rouge_2: likewise of the shared word pairs.
        rouge_l: likewise of the longest common subsequence of words.
        num_empty: answers without a single word; they count as 0 in the means.
        row_rouge_l: ROUGE-L of each row, in their order.
    """

    rouge_1: float | None
    rouge_2: float | None
    rouge_l: float | None
    num_empty: int
    row_rouge_l: list[float]


class UnicodeTokenizer:
    """Split a text into lower-case words of letters, digits and marks.

    For ASCII text the words are those of rouge_score's own tokenizer, which drops every other letter and so
    scores 0 for most of the world's languages.
    """

    def tokenize(self, text: str) -> list[str]:
        """Return the words of a text.

        Args:
            text: any text; composed and decomposed letters count as the same.
        """
        # One form for each letter first: decomposed Hangul or accents would be other words than composed ones.
        text = unicodedata.normalize("NFC", text).lower()
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


def score_rouge(references: Sequence[str], predictions: Sequence[str]) -> RougeScores:
    """Score each answer against its reference and average over all of them.

    Args:
        references: the true answers.
        predictions: the generated ones, as many; an empty one scores 0.

    Returns:
        Means and per-row ROUGE-L.
    """
    from rouge_score.rouge_scorer import RougeScorer

    tokenizer = UnicodeTokenizer()
    # No stemmer: there is one for English alone, which would bend the words of every other language.
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=False, tokenizer=tokenizer)
    # F-measures by kind. Precision or recall alone would reward answers for being short or long.
    scores = [
        {kind: float(score.fmeasure) for kind, score in scorer.score(reference, prediction).items()}
        for reference, prediction in zip(references, predictions, strict=True)
    ]

    def mean(kind: str) -> float | None:
        return sum(row[kind] for row in scores) / len(scores) if scores else None

    return RougeScores(
        rouge_1=mean("rouge1"),
        rouge_2=mean("rouge2"),
        rouge_l=mean("rougeL"),
        num_empty=sum(not tokenizer.tokenize(prediction) for prediction in predictions),
        row_rouge_l=[row["rougeL"] for row in scores],
    )


def _is_spaceless(character: str) -> bool:
    # Latin, Greek, Cyrillic, Arabic and the scripts of India lie below the first range and need no search.
    code = ord(character)
    return code >= _SPACELESS_RANGES[0][0] and any(first <= code <= last for first, last in _SPACELESS_RANGES)
