"""ROUGE gives the usual tool's values for English, and counts other scripts too."""

from __future__ import annotations

import unicodedata

import pytest

from lm_tuning.evaluation.rouge import UnicodeTokenizer, score_rouge


def test_an_exact_answer_without_latin_letters_scores_one() -> None:
    sentence = "민수는 내일 회의에 간다"
    scores = score_rouge([sentence], [sentence])
    assert (scores.rouge_1, scores.rouge_2, scores.rouge_l) == (1.0, 1.0, 1.0)
    assert scores.num_empty == 0


def test_english_values_are_the_usual_ones() -> None:
    scores = score_rouge(["a b c d"], ["a b"])
    assert scores.rouge_1 == pytest.approx(0.6667, abs=1e-4)
    assert scores.rouge_2 == pytest.approx(0.5)
    assert scores.rouge_l == pytest.approx(0.6667, abs=1e-4)


@pytest.mark.parametrize(
    ("reference", "prediction"),
    [
        ("Return True if the path is a resource.", "return true, if path is resource"),
        ("The cat's running_fast on 3.5 mats!", "Cats run fast -- on 3 mats"),
        ("one\ntwo\tthree", "three two one"),
        ("runner running runs", "run"),
    ],
)
def test_english_agrees_with_the_default_tokenizer(reference: str, prediction: str) -> None:
    from rouge_score.rouge_scorer import RougeScorer

    usual = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=False).score(reference, prediction)
    ours = score_rouge([reference], [prediction])
    assert ours.rouge_1 == pytest.approx(usual["rouge1"].fmeasure)
    assert ours.rouge_2 == pytest.approx(usual["rouge2"].fmeasure)
    assert ours.rouge_l == pytest.approx(usual["rougeL"].fmeasure)


def test_an_empty_answer_counts_as_zero() -> None:
    scores = score_rouge(["a b c", "d e"], ["a b c", ""])
    assert scores.rouge_1 == 0.5
    assert scores.rouge_l == 0.5
    assert scores.num_empty == 1
    assert scores.row_rouge_l == [1.0, 0.0]


@pytest.mark.parametrize("prediction", ["", " \n", "...", "…!", "。。"])
def test_an_answer_without_words_is_empty(prediction: str) -> None:
    scores = score_rouge(["a b"], [prediction])
    assert (scores.rouge_1, scores.num_empty) == (0.0, 1)


def test_no_rows_have_no_scores() -> None:
    scores = score_rouge([], [])
    assert (scores.rouge_1, scores.rouge_2, scores.rouge_l) == (None, None, None)
    assert scores.row_rouge_l == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Café_au-lait, 2x", ["café", "au", "lait", "2x"]),
        ("Привет, МИР", ["привет", "мир"]),
        ("नमस्ते दुनिया", ["नमस्ते", "दुनिया"]),
        ("東京へ行くABC de", ["東", "京", "へ", "行", "く", "abc", "de"]),
        ("ที่นี่", ["ที่", "นี่"]),
    ],
)
def test_words_of_other_scripts(text: str, words: list[str]) -> None:
    assert UnicodeTokenizer().tokenize(text) == words


def test_composed_and_decomposed_letters_agree() -> None:
    text = "값은 café"
    decomposed = unicodedata.normalize("NFD", text)
    assert decomposed != text
    assert score_rouge([text], [decomposed]).rouge_l == 1.0
