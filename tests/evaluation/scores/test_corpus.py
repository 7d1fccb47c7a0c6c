"""BLEU and chrF are sacrebleu's, of a corpus, of drawn rows, and of sums of any kind."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from tests.evaluation.scores.answers import scores_of

WORDS = "the cat sat on a mat dog runs 민수는 내일 회의에 간다 東京へ 行く . , ! don't 3.5".split()


def make_corpus(seed: int, *, num_rows: int = 40, shared: float = 0.4) -> tuple[list[str], list[str]]:
    draw = random.Random(seed)
    references = [" ".join(draw.choices(WORDS, k=draw.randint(1, 14))) for _ in range(num_rows)]
    answers = [
        " ".join(word if draw.random() < 1 - shared / 2 else draw.choice(WORDS) for word in reference.split())
        if draw.random() < shared
        else " ".join(draw.choices(WORDS, k=draw.randint(0, 10)))
        for reference in references
    ]
    return references, answers


CORPORA = [
    *(make_corpus(seed) for seed in range(4)),
    make_corpus(9, num_rows=3, shared=0.0),
    (["a b c"], ["a b c"]),  # no run of four words
    (["the cat sat on a mat"], [""]),
    (["abc def ghi jkl mno"], ["xyz"]),
    (["a b c d e"], ["a b x d e"]),
]


@pytest.mark.parametrize("tokenizer", ["13a", "intl", "zh", "char", "none"])
def test_bleu_is_that_of_sacrebleu(tokenizer: str) -> None:
    for references, answers in CORPORA:
        metric = BLEU(tokenize=tokenizer)
        wanted = metric.corpus_score(answers, [references]).score
        [score] = scores_of(references, answers, "bleu", bleu_tokenizer=tokenizer).values()
        assert score.value == pytest.approx(wanted, rel=1e-12, abs=1e-12), (references, answers)
        assert score.signature == str(metric.get_signature())


@pytest.mark.parametrize("word_order", [0, 1, 2])
def test_chrf_is_that_of_sacrebleu(word_order: int) -> None:
    for references, answers in CORPORA:
        metric = CHRF(word_order=word_order)
        wanted = metric.corpus_score(answers, [references]).score
        [score] = scores_of(references, answers, "chrf", chrf_word_order=word_order).values()
        assert score.value == pytest.approx(wanted, rel=1e-12, abs=1e-12), (references, answers)
        assert score.signature == str(metric.get_signature())


@pytest.mark.parametrize(("name", "metric"), [("bleu", BLEU()), ("chrf", CHRF())])
def test_drawn_rows_score_as_sacrebleu_scores_them(name: str, metric: Any) -> None:
    references, answers = make_corpus(5)
    [score] = scores_of(references, answers, name).values()
    drawn = np.random.default_rng(0).integers(0, len(references), (20, len(references)))
    # (draws, rows, k) to (draws, k) to (draws,), all at once
    values = score.combine(score.statistics[drawn].sum(axis=1))
    wanted = [metric.corpus_score([answers[i] for i in rows], [[references[i] for i in rows]]).score for rows in drawn]
    assert values.tolist() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("name", ["bleu", "chrf"])
def test_an_answer_that_is_its_reference_scores_one_hundred(name: str) -> None:
    references = [sentence for sentence in make_corpus(1)[0] if len(sentence.split()) > 4]
    [score] = scores_of(references, references, name).values()
    assert score.value == pytest.approx(100.0)
    assert score.row_values.tolist() == pytest.approx([100.0] * len(references))
