"""Exact match compares what it is told to compare, and nothing that only looks alike."""

from __future__ import annotations

import pytest

from lm_tuning.evaluation.scores.exact_match import ExactMatch
from tests.evaluation.scores.answers import scores_of, value_of


@pytest.mark.parametrize(
    ("normalizers", "reference", "answer", "is_right"),
    [
        ([], "Paris", "Paris", True),
        ([], "Paris", "Paris ", False),
        ([], "값", "값", True),
        (["whitespace"], "New  York", " New\nYork", True),
        (["whitespace"], "Paris", "paris", False),
        (["casefold"], "Straße", "STRASSE", True),
        (["punctuation"], "Paris.", "Paris", True),
        (["punctuation"], "파리。", "파리", True),
        (["punctuation"], "a-b", "ab", True),
        (["articles"], "the Paris", "Paris", True),
        (["articles"], "theory", "ory", False),
        (["casefold", "punctuation", "articles", "whitespace"], "The  U.S.", "us", True),
        (["number"], "1,200.50", "$1200.5", True),
        (["number"], "72", "72.0", True),
        (["number"], "72", "72.", True),
        (["number"], "-0", "0", True),
        (["number"], "72", "720", False),
        (["number"], "0.1", "0.10000000000000000000000000000000001", False),
        (["number"], "1e3", "1000", True),
        (["number"], "1e999999999", "1e999999999", True),
        (["number"], "no number", "no number", True),
        (["number"], "nan", "NaN", False),
        (["number"], "50 %", "50", True),
    ],
)
def test_normalizers(normalizers: list[str], reference: str, answer: str, is_right: bool) -> None:
    assert value_of(reference, answer, "exact_match", normalizers=normalizers) == float(is_right)


@pytest.mark.parametrize(
    ("pattern", "reference", "answer", "is_right"),
    [
        ("gsm8k", "He has 3*4=<<3*4=12>>12.\n#### 12", "It is 12, so\n#### 12", True),
        ("gsm8k", "#### 1,200", "#### 1200", True),
        ("gsm8k", "#### 12", "#### $12.00 in all", True),
        ("gsm8k", "#### 12", "12", False),
        ("gsm8k", "#### 12", "#### 13 no, #### 12", False),
        ("gsm8k", "#### -3", "#### -3.", True),
        ("gsm8k", "#### -3", "#### -$3", True),
        ("gsm8k", "#### -3", "#### $3", False),
        ("last_number", "#### 12", "first 3, then 12.", True),
        ("last_number", "#### 12", "first 12, then 3.", False),
        (r"answer: (\w+)", "answer: yes", "I think\nanswer: yes\nanswer: no", True),
        (r"(?:answer|result): (\w+)", "answer: yes", "result: yes", True),
    ],
)
def test_patterns(pattern: str, reference: str, answer: str, is_right: bool) -> None:
    found = value_of(reference, answer, "exact_match", answer_pattern=pattern, normalizers=["whitespace", "number"])
    assert found == float(is_right)


def test_a_comma_behind_the_last_number_is_no_part_of_it() -> None:
    found = value_of("1,200", "It is 1,200, I think.", "exact_match", answer_pattern="last_number")
    assert found == 1.0


def test_an_answer_without_the_pattern_is_wrong_and_counted() -> None:
    references, answers = ["#### 1", "#### 2", "#### 3"], ["#### 1", "2", ""]
    [score] = scores_of(references, answers, "exact_match", answer_pattern="gsm8k").values()
    assert score.row_values.tolist() == [1.0, 0.0, 0.0]
    assert score.is_binary
    assert ExactMatch(["whitespace"], "gsm8k").count_without(answers) == 2
    assert ExactMatch(["whitespace"], None).count_without(answers) is None


def test_the_signature_says_what_is_overlooked() -> None:
    normal = ExactMatch(["casefold", "number"], "gsm8k").signature
    assert normal == "nrefs:1|norm:nfc+casefold+number|pattern:gsm8k|version:1"
    assert ExactMatch([], None).signature != normal
