"""ROUGE gives the usual tool's values for English, and counts other scripts too."""

from __future__ import annotations

import csv
import os
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import pytest

from lm_tuning.errors import UserError
from lm_tuning.evaluation.scores import rouge_tokenizers
from lm_tuning.evaluation.scores.rouge import KINDS
from lm_tuning.evaluation.scores.rouge_tokenizers import (
    CharacterTokenizer,
    MultilingualTokenizer,
    WhitespaceTokenizer,
    make_tokenizer,
)
from lm_tuning.evaluation.scores.score import count_empty
from tests.evaluation.scores.answers import scores_of, value_of

ALL = ("rouge_1", "rouge_2", "rouge_l", "rouge_l_sum")
SENTENCES = [
    "민수는 내일 회의에 간다",
    "네",
    "…",
    "The cat sat.",
    "Привет, мир!",
    "東京へ行く",
    "ที่นี่",
    "नमस्ते दुनिया",
    "مرحبا بالعالم",
    "🙂🙂",
]


def needs_kiwi() -> None:
    pytest.importorskip("kiwipiepy", reason="the extra korean is not installed")


@pytest.mark.parametrize("tokenizer", ["multilingual", "whitespace", "characters"])
def test_an_answer_that_is_its_reference_scores_one_in_every_language(tokenizer: str) -> None:
    found = scores_of(SENTENCES, SENTENCES, *ALL, "rouge_sum", rouge_tokenizer=tokenizer)
    assert {name: score.value for name, score in found.items()} == {**dict.fromkeys(ALL, 1.0), "rouge_sum": 3.0}
    for name in ALL:
        assert found[name].row_values.tolist() == [1.0] * len(SENTENCES), name


def test_an_answer_of_morphemes_that_is_its_reference_scores_one() -> None:
    needs_kiwi()
    found = scores_of(SENTENCES, SENTENCES, "rouge_sum", rouge_tokenizer="korean_morphemes")
    assert found["rouge_sum"].value == 3.0
    assert "tok:korean_morphemes-kiwipiepy-" in found["rouge_sum"].signature


def korean_answers() -> list[str]:
    data = Path(os.environ.get("LM_TUNING_TEST_DATA", Path(__file__).parents[3] / "../shared/data"))
    path = data / "chatbot_ko" / "ChatbotData.csv"
    if not path.is_file():
        pytest.skip(f"{path} is not there (LM_TUNING_TEST_DATA names another folder)")
    with path.open(encoding="utf-8", newline="") as file:
        return [row["A"] for row in csv.DictReader(file)]


@pytest.mark.parametrize("tokenizer", ["multilingual", "whitespace", "characters", "korean_morphemes"])
def test_real_korean_answers_score_one_against_themselves_and_less_against_others(tokenizer: str) -> None:
    if tokenizer == "korean_morphemes":
        needs_kiwi()
    answers = korean_answers()[:3000:10]
    same = scores_of(answers, answers, *ALL, "rouge_sum", rouge_tokenizer=tokenizer)
    assert [score.value for score in same.values()] == [1.0, 1.0, 1.0, 1.0, 3.0]
    others = scores_of(answers, answers[1:] + answers[:1], "rouge_1", rouge_tokenizer=tokenizer)
    assert 0.0 < others["rouge_1"].value < 0.3


def test_particles_count_less_by_morphemes() -> None:
    needs_kiwi()
    reference, answer = "민수는 회의에 갔다", "민수가 회의를 갔다"
    words = value_of(reference, answer, "rouge_1", rouge_tokenizer="whitespace")
    morphemes = value_of(reference, answer, "rouge_1", rouge_tokenizer="korean_morphemes")
    assert words == pytest.approx(1 / 3)
    # 민수, 회의, 가, 었, 다 of seven on each side
    assert morphemes == pytest.approx(5 / 7)


def test_morphemes_without_their_package_are_refused_with_the_way_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rouge_tokenizers, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"rouge_tokenizer = korean_morphemes needs .*kiwipiepy.*lm-tuning\[korean\]"):
        make_tokenizer("korean_morphemes")


def test_english_values_are_the_usual_ones() -> None:
    found = scores_of(["a b c d"], ["a b"], *ALL, "rouge_sum")
    assert found["rouge_1"].value == pytest.approx(2 / 3)
    assert found["rouge_2"].value == pytest.approx(0.5)
    assert found["rouge_l"].value == pytest.approx(2 / 3)
    assert found["rouge_sum"].value == pytest.approx(2 / 3 + 0.5 + 2 / 3)


@pytest.mark.parametrize(
    ("reference", "prediction"),
    [
        ("Return True if the path is a resource.", "return true, if path is resource"),
        ("The cat's running_fast on 3.5 mats!", "Cats run fast -- on 3 mats"),
        ("one\ntwo\tthree", "three two one"),
        ("one two.\nthree four five.\nsix", "three five.\ntwo one.\nsix seven"),
        ("runner running runs", "run"),
    ],
)
def test_english_agrees_with_the_usual_tool(reference: str, prediction: str) -> None:
    from rouge_score.rouge_scorer import RougeScorer

    usual = RougeScorer([*KINDS.values()], use_stemmer=False).score(reference, prediction)
    found = scores_of([reference], [prediction], *ALL)
    for name, kind in KINDS.items():
        assert found[name].value == pytest.approx(usual[kind].fmeasure), name


def test_lines_of_a_summary_may_come_in_another_order() -> None:
    reference, answer = "the cat sat\na dog ran", "a dog ran\nthe cat sat"
    assert value_of(reference, answer, "rouge_l_sum") == 1.0
    assert value_of(reference, answer, "rouge_l") == 0.5


def test_an_empty_answer_counts_as_zero() -> None:
    found = scores_of(["a b c", "d e"], ["a b c", ""], *ALL)
    for name in ALL:
        assert found[name].value == 0.5, name
        assert found[name].row_values.tolist() == [1.0, 0.0]
        assert found[name].row_ids.tolist() == [10, 11]


@pytest.mark.parametrize("prediction", ["", " \n", "...", "…!", "。。"])
def test_an_answer_without_words_is_empty(prediction: str) -> None:
    assert count_empty([prediction, "a"]) == 1
    assert value_of("a b", prediction, "rouge_1") == 0.0


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
def test_words_of_other_scripts(text: str, words: Sequence[str]) -> None:
    assert MultilingualTokenizer().tokenize(text) == words


def test_whitespace_and_characters_keep_punctuation() -> None:
    assert WhitespaceTokenizer().tokenize(" Hi,  there!\n") == ["hi,", "there!"]
    assert CharacterTokenizer().tokenize("가나 A!\n") == ["가", "나", "a", "!"]


def test_composed_and_decomposed_letters_agree() -> None:
    text = "값은 café"
    decomposed = unicodedata.normalize("NFD", text)
    assert decomposed != text
    for tokenizer in ("multilingual", "whitespace", "characters"):
        assert make_tokenizer(tokenizer).tokenize(text) == make_tokenizer(tokenizer).tokenize(decomposed)  # type: ignore[arg-type]
    assert value_of(text, f"{decomposed} x", "rouge_l") == pytest.approx(0.8)


def test_a_signature_names_tokenizer_normalization_and_version() -> None:
    [score] = scores_of(["a"], ["a"], "rouge_2", rouge_tokenizer="characters").values()
    kind, *_, version = score.signature.split("|")
    assert kind == "kind:rouge2"
    assert "|tok:characters.1|norm:nfc+lower|" in score.signature
    assert version.startswith("version:rouge-score-")
