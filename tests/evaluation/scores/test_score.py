"""Parameters choose the scores, in their order; references that cannot be compared with are refused with their rows."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from lm_tuning.errors import UserError
from lm_tuning.evaluation.scores.score import Scorer
from lm_tuning.parameters import Parameters, validate_parameters
from lm_tuning.parameters.scores import ScoreParameters
from tests.evaluation.scores.answers import answered, scores_of


def test_scores_come_in_the_order_of_the_parameters() -> None:
    names = ("exact_match", "chrf", "rouge_l", "bleu", "rouge_sum", "json_valid", "rouge_1")
    assert tuple(scores_of(["a b"], ["a"], *names)) == names


def test_every_score_has_a_signature_of_its_own() -> None:
    names = [*ScoreParameters.model_fields["names"].annotation.__args__[0].__args__]  # type: ignore[union-attr]
    names.remove("json_schema")
    found = scores_of(["a b"], ["a"], *names)
    assert len({score.signature for score in found.values()}) == len(names) == 9
    assert all(score.title for score in found.values())


def test_no_rows_have_no_scores() -> None:
    found = scores_of([], [], "rouge_l", "bleu", "chrf", "exact_match", "json_valid")
    assert [score.num_rows for score in found.values()] == [0] * 5


def test_a_reference_without_the_pattern_is_named() -> None:
    scorer = Scorer(ScoreParameters(names=["exact_match"], answer_pattern="gsm8k"))
    scorer.check_references(answered(["#### 1"], [""]))
    with pytest.raises(UserError) as caught:
        scorer.check_references(
            answered(["#### 1", "two", "three"], ["", "", ""]), find_row=lambda row_id: f"f.jsonl, row {row_id - 9}"
        )
    [problem] = caught.value.problems
    assert "2 held-out rows (f.jsonl, row 2, f.jsonl, row 3) have a reference" in problem
    assert "evaluate.scores.answer_pattern = gsm8k finds nothing, such as 'two'" in problem


def test_missing_references_are_named_unless_no_score_needs_them() -> None:
    rows = answered(["a", " ", "c"], ["", "", ""])
    with pytest.raises(UserError, match=r"1 held-out row \(row 11\) has no reference"):
        Scorer(ScoreParameters()).check_references(rows)
    Scorer(ScoreParameters(names=["json_valid"])).check_references(rows)


@pytest.mark.parametrize(
    ("scores", "wanted"),
    [
        ({"answer_pattern": "("}, "no regular expression"),
        ({"answer_pattern": "abc", "names": ["exact_match"]}, "has 0 groups"),
        ({"answer_pattern": "(a)(b)", "names": ["exact_match"]}, "has 2 groups"),
        ({"answer_pattern": "gsm8k"}, "read by exact_match alone"),
        ({"names": ["json_schema"]}, "set json_schema_path"),
        ({"json_schema_path": "a.json"}, "read by the score json_schema alone"),
        ({"names": ["bleu", "bleu"]}, "names holds bleu more than once"),
        ({"own_metrics": ["score"]}, "the dotted name of a Python function"),
        ({"names": ["blue"]}, "bleu"),
        ({"rouge_tokenizer": "mecab"}, "korean_morphemes"),
    ],
)
def test_wrong_settings_are_refused_with_key_and_way(scores: dict[str, Any], wanted: str) -> None:
    raw = {"train": {"effective_batch_tokens": 512, "max_steps": 40}, "evaluate": {"scores": scores}}
    with pytest.raises(UserError) as caught:
        validate_parameters(raw)
    assert wanted in str(caught.value)
    assert "evaluate.scores" in str(caught.value)


def test_the_defaults_are_the_scores_that_there_always_were() -> None:
    assert Parameters().evaluate.scores.names == ["rouge_l", "rouge_1", "rouge_2"]
    assert Parameters().evaluate.scores.rouge_tokenizer == "multilingual"
    with pytest.raises(ValidationError):
        ScoreParameters(names="rouge_l")  # type: ignore[arg-type]
