"""BLEU and chrF by sacrebleu: its counts of each row, and its formulas over sums of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lm_tuning.evaluation.scores.answered import Answered, counted
from lm_tuning.evaluation.statistics.scored_rows import FloatArray, ScoredRows
from lm_tuning.parameters.scores import BleuTokenizer

MAX_NGRAM = 4
CHAR_ORDER = 6
_BETA_SQUARED = 4.0


@dataclass(frozen=True)
class Corpus:
    """One of sacrebleu's corpus scores.

    Attributes:
        names: its key.
        title: what reports call it.
        metric: sacrebleu's object.
        signature: how it is computed, in sacrebleu's words.
        combine: its formula for many sums at once, ``(…, k)`` to ``(…)``.
    """

    names: Sequence[str]
    title: str
    metric: Any
    signature: str
    combine: Callable[[FloatArray], FloatArray]

    def score(self, rows: Answered) -> dict[str, ScoredRows]:
        """Return the score of one model."""
        [name] = self.names
        # Of one row after the other: what sacrebleu adds up for a corpus, (rows, k).
        counts = self.metric._extract_corpus_statistics(list(rows.answers), [list(rows.references)])
        width = 2 + 2 * MAX_NGRAM if name == "bleu" else 3 * self.metric.order
        statistics = np.asarray(counts, dtype=np.float64).reshape(-1, width)
        more: dict[str, Any] = {"combine": self.combine, "title": self.title, "unit": "0 to 100"}
        return {name: counted(name, statistics, rows, signature=self.signature, **more)}


def make_bleu(tokenizer: BleuTokenizer) -> Corpus:
    """Return BLEU with up to four words and sacrebleu's default smoothing.

    Args:
        tokenizer: of sacrebleu.
    """
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU(tokenize=tokenizer)
    return Corpus(["bleu"], "BLEU", metric, _signature(metric), combine_bleu)


def make_chrf(word_order: int) -> Corpus:
    """Return chrF with up to six characters.

    Args:
        word_order: longest run of words; 2 makes it chrF++.
    """
    from sacrebleu.metrics.chrf import CHRF

    metric = CHRF(word_order=word_order)
    return Corpus(["chrf"], "chrF" + "+" * word_order, metric, _signature(metric), combine_chrf)


def _signature(metric: Any) -> str:
    # It says how many references there were, which sacrebleu only knows after it has seen some.
    metric.num_refs = 1
    return str(metric.get_signature())


def combine_bleu(sums: FloatArray) -> FloatArray:
    """Return BLEU, 0 to 100, of sums as sacrebleu counts them.

    Args:
        sums: answer and reference words, then right and all n-grams by length, ``(…, 2 + 2 * 4)``.

    Source: Post, "A Call for Clarity in Reporting BLEU Scores", 2018; sacrebleu's ``BLEU.compute_bleu`` with its
    smoothing "exp", here for many sums at once.
    """
    answer, reference = sums[..., 0], sums[..., 1]
    right, total = sums[..., 2 : 2 + MAX_NGRAM], sums[..., 2 + MAX_NGRAM :]  # (…, 4)
    with np.errstate(divide="ignore", invalid="ignore"):
        brevity = np.where(answer < reference, np.exp(1 - reference / answer), 1.0)
        # Each n-gram length without a hit counts half as much of one as the one before: 1/2, 1/4, …
        halvings = np.cumsum(right == 0, axis=-1)
        precision = np.where(right == 0, 0.5**halvings, right) / total
        score: FloatArray = 100 * brevity * np.exp(np.log(precision).mean(axis=-1))
    # Without a hit, or without a single run of four words, it is 0.
    return np.where((right.sum(axis=-1) == 0) | (total == 0).any(axis=-1), 0.0, score)


def combine_chrf(sums: FloatArray) -> FloatArray:
    """Return chrF, 0 to 100, of sums as sacrebleu counts them.

    Args:
        sums: for each length, n-grams of answer and reference and those that both have, ``(…, 3 * lengths)``.

    Source: Popović, "chrF: character n-gram F-score for automatic MT evaluation", 2015; sacrebleu's
    ``CHRF._compute_f_score`` without its epsilon, here for many sums at once.
    """
    counts = sums.reshape(*sums.shape[:-1], -1, 3)
    answer, reference, both = counts[..., 0], counts[..., 1], counts[..., 2]  # (…, lengths)
    counts_at_all = (answer > 0) & (reference > 0)
    # A length that neither has, such as six characters of short texts, says nothing.
    num_lengths = np.maximum(counts_at_all.sum(axis=-1), 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.where(counts_at_all, both / answer, 0.0).sum(axis=-1) / num_lengths
        recall = np.where(counts_at_all, both / reference, 0.0).sum(axis=-1) / num_lengths
        score: FloatArray = 100 * (1 + _BETA_SQUARED) * precision * recall / (_BETA_SQUARED * precision + recall)
    return np.where(precision + recall > 0, score, 0.0)
