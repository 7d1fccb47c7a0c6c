"""Own metrics are called as documented, and one that fails takes no other score with it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lm_tuning.errors import UserError
from lm_tuning.evaluation.scores.score import Scorer, check_scores
from lm_tuning.parameters.scores import ScoreParameters
from tests.evaluation.scores.answers import answered

WriteModule = Callable[[str], None]


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WriteModule]:
    monkeypatch.syspath_prepend(tmp_path)

    def write(code: str) -> None:
        (tmp_path / "planted_metrics.py").write_text(code)
        sys.modules.pop("planted_metrics", None)

    yield write
    sys.modules.pop("planted_metrics", None)


def make_scorer(*own: str) -> Scorer:
    return Scorer(ScoreParameters(names=["rouge_1"], own_metrics=[*own]))


def test_it_gets_references_answers_and_rows_and_its_mean_is_the_score(write_module: WriteModule) -> None:
    write_module(
        "def score(references, answers, rows):\n"
        "    assert [row['prompt'] for row in rows] == [f\"prompt {row['row_id']}\" for row in rows]\n"
        "    return [len(a) / len(r) for r, a in zip(references, answers)]\n"
        "score.signature = 'length:2'\nscore.higher_is_better = False\n"
    )
    base, tuned = answered(["abcd", "ab"], ["ab", "ab"]), answered(["abcd", "ab"], ["abcd", ""])
    found = make_scorer("planted_metrics.score").score(base, tuned)
    first, second = found.scored["planted_metrics.score"]
    assert (first.value, second.value) == (0.75, 0.5)
    assert second.row_values.tolist() == [1.0, 0.0]
    assert second.signature == "own:planted_metrics.score|length:2"
    assert not second.higher_is_better
    assert [*found.scored] == ["rouge_1", "planted_metrics.score"]


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("raise KeyError('x')", "planted_metrics.score raised KeyError: 'x' ("),
        ("return [1.0]", "returned 1 values for 2 rows"),
        ("return None", "raised TypeError"),
        ("return [1.0, float('nan')]", "returned nan for row 11"),
        ("return [1.0, 'good']", "returned 'good' for row 11"),
    ],
)
def test_one_that_fails_loses_its_own_score_alone(write_module: WriteModule, body: str, wanted: str) -> None:
    write_module(f"def score(references, answers, rows):\n    {body}\n")
    rows = answered(["a", "b"], ["a", "b"])
    scorer = make_scorer("planted_metrics.score")
    found = scorer.score(rows, rows)
    assert [*found.scored] == ["rouge_1"]
    assert wanted in found.failed["planted_metrics.score"]
    # Before any model is loaded it is tried on references.
    with pytest.raises(UserError) as caught:
        scorer.check_references(rows)
    assert wanted in str(caught.value)


def test_what_it_does_to_its_lists_changes_no_other_score(write_module: WriteModule) -> None:
    write_module("def score(references, answers, rows):\n    answers.clear()\n    return [0.0 for _ in references]\n")
    rows = answered(["a", "b"], ["a", "b"])
    found = make_scorer("planted_metrics.score").score(rows, rows)
    assert found.scored["rouge_1"][1].value == 1.0
    assert rows.answers == ["a", "b"]


def test_all_that_cannot_be_imported_is_named_at_once(write_module: WriteModule) -> None:
    write_module("import math\nnumber = 3\n")
    names = ["no_such_package.score", "planted_metrics.missing", "planted_metrics.number"]
    with pytest.raises(UserError) as caught:
        check_scores(ScoreParameters(own_metrics=names))
    problems = caught.value.problems
    assert len(problems) == 3
    for name, problem in zip(names, problems, strict=True):
        assert f"evaluate.scores.own_metrics: {name}" in problem
    write_module("raise RuntimeError('at import')\n")
    with pytest.raises(UserError, match="RuntimeError: at import"):
        check_scores(ScoreParameters(own_metrics=["planted_metrics.score"]))
