"""Score answers by ROUGE, with rouge-score on words of any script."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from importlib.metadata import version

from lm_tuning.evaluation.scores.answered import Answered
from lm_tuning.evaluation.scores.rouge_tokenizers import Tokenizer
from lm_tuning.evaluation.statistics.scored_rows import ScoredRows, mean_of_rows

KINDS = {"rouge_1": "rouge1", "rouge_2": "rouge2", "rouge_l": "rougeL", "rouge_l_sum": "rougeLsum"}
"""Our names and those of rouge-score."""

SUMMED = ("rouge_1", "rouge_2", "rouge_l")
"""What ``rouge_sum`` adds up."""

TITLES = {
    "rouge_1": "ROUGE-1",
    "rouge_2": "ROUGE-2",
    "rouge_l": "ROUGE-L",
    "rouge_l_sum": "ROUGE-Lsum",
    "rouge_sum": "ROUGE-1 + ROUGE-2 + ROUGE-L",
}


class Rouge:
    """F-measures of shared words, pairs of words, and longest common subsequences, means over rows."""

    def __init__(self, names: Sequence[str], tokenizer: Tokenizer) -> None:
        """Keep what is wanted.

        Args:
            names: keys of :data:`TITLES`.
            tokenizer: what is counted.
        """
        from rouge_score.rouge_scorer import RougeScorer

        self.names = names
        self._tokenizer = tokenizer
        parts = [*names, *(SUMMED if "rouge_sum" in names else ())]
        # No stemmer: there is one for English alone, which would bend the words of every other language.
        self._scorer = RougeScorer(
            [KINDS[name] for name in dict.fromkeys(parts) if name in KINDS], use_stemmer=False, tokenizer=tokenizer
        )

    def score(self, rows: Answered) -> dict[str, ScoredRows]:
        """Return the scores of one model; an answer without a word scores 0."""
        of_rows = [
            self._of_row(reference, answer) for reference, answer in zip(rows.references, rows.answers, strict=True)
        ]
        return {
            name: mean_of_rows(
                name,
                [self._value(name, values) for values in of_rows],
                rows.ids,
                title=TITLES[name],
                unit="0 to 3" if name == "rouge_sum" else "0 to 1",
                signature=self.signature(name),
            )
            for name in self.names
        }

    def signature(self, name: str) -> str:
        """Return how a score is computed, in the manner of sacrebleu.

        Args:
            name: one of the scores.
        """
        parts = [
            "kind:R1+R2+RL" if name == "rouge_sum" else f"kind:{KINDS[name]}",
            "nrefs:1",
            f"tok:{self._tokenizer.signature}",
            "norm:nfc+lower",
            "measure:f1",
            "same:1",  # see _of_row
            f"version:rouge-score-{version('rouge-score')}",
        ]
        return "|".join(parts)

    def _of_row(self, reference: str, answer: str) -> dict[str, float]:
        """Return the F-measures of one answer by rouge-score's names."""
        # Precision or recall alone would reward answers for being short or long.
        found = self._scorer.score(reference, answer)
        # "네" has no pair of words, and "…" no word, so an answer that is its reference would score 0.
        is_same = bool(answer.strip()) and _same(reference, answer)
        return {kind: 1.0 if is_same else float(score.fmeasure) for kind, score in found.items()}

    @staticmethod
    def _value(name: str, values: dict[str, float]) -> float:
        parts = SUMMED if name == "rouge_sum" else (name,)
        return sum(values[KINDS[part]] for part in parts)


def _same(reference: str, answer: str) -> bool:
    return unicodedata.normalize("NFC", reference).strip() == unicodedata.normalize("NFC", answer).strip()
