from __future__ import annotations

from typing import Any

import pytest

from tests.preflight.conftest import Look, questions


def issues(look: Look, *sources: Any, **settings: Any) -> list[tuple[str, str]]:
    """Return level and text, of a run that is otherwise quiet: 100 rows, 40 of them held out, 30 steps."""
    splitting = {"validation": 20, "test": 20} | settings.pop("splitting", {})
    figures = look(*(sources or (questions(100),)), splitting=splitting, **settings)
    return [(issue["level"], issue["text"]) for issue in figures["concerns"]]


def test_ordinary_rows_raise_no_issues(look: Look):
    assert issues(look) == []


@pytest.mark.parametrize(
    ("settings", "level", "text"),
    [
        ({"warmup_steps": 30}, "stop", "The warm-up takes 30 steps, but the run has 30"),
        ({"warmup_steps": 0.6}, "warning", "The warm-up takes 18 of 30 steps."),
        ({"load_best": True, "splitting": {"validation": 0}}, "stop", "train.load_best compares validation losses"),
        ({"num_epochs": None, "max_steps": 24}, "warning", "The run ends after 0.80 epochs: 20% of the rows"),
        ({"effective_batch_rows": 61}, "warning", "A step takes 61 rows, but an epoch has 60"),
        ({"effective_batch_rows": 59, "num_epochs": 10}, "note", "The last step of every epoch has 1 row,"),
        (
            {"effective_batch_rows": None, "effective_batch_tokens": 8},
            "warning",
            "A step takes at most 8 tokens, but rows have up to 9",
        ),
        ({"num_epochs": None, "max_steps": 1}, "note", "The whole run has 1 step, which is few"),
        ({"eval_every_steps": 31}, "note", "train.eval_every_steps is 31, but the run has 30 steps"),
        ({"save_every_steps": 31}, "note", "train.save_every_steps is 31, but the run has 30 steps"),
        ({"micro_batch_tokens": 8}, "note", "Longer than a micro-batch of 8 tokens: 60 rows."),
        ({"splitting": {"validation": 0, "test": 0}}, "warning", "No row is held out"),
        ({"splitting": {"validation": 0, "test": 1}}, "note", "Held out: only 1 row."),
    ],
)
def test_settings_that_do_not_fit_the_rows_are_named(look: Look, settings: dict[str, Any], level: str, text: str):
    found = issues(look, **settings)
    assert [one for one, words in found if words.startswith(text)] == [level], found


def test_the_gravest_come_first(look: Look):
    found = issues(look, warmup_steps=100, num_epochs=None, max_steps=10, save_every_steps=11)
    assert [level for level, _ in found] == ["stop", "warning", "note", "note"]


def test_rows_that_are_cut_are_named_with_a_limit_that_holds_them(look: Look):
    rows = [*questions(96), *({"prompt": "x" * 40 + str(index), "response": "y"} for index in range(4))]
    figures = look(rows, tokenizing={"max_length_tokens": 20}, splitting={"validation": 0, "test": 0})
    cut = next(issue for issue in figures["concerns"] if issue["section"] == "lengths")
    assert cut == {
        "level": "warning",
        "section": "lengths",
        "text": "The prompt is cut in 4 training rows (4.00%) by tokenize.max_length_tokens=20.",
        "advice": "tokenize.max_length_tokens=46 would hold every row, if model and memory allow.",
    }


def test_answers_without_an_end_are_worse(look: Look):
    rows = [*questions(99), {"prompt": "x", "response": "y" * 40}]
    found = issues(look, rows, tokenizing={"max_length_tokens": 20}, splitting={"validation": 0, "test": 0})
    assert ("warning", "The end of the answer is cut in 1 training row (1.00%) by tokenize.max_length_tokens=20: the "
            "model learns answers without an end.") in found  # fmt: skip


def test_what_checking_and_splitting_found_is_repeated(look: Look):
    rows = [*questions(100), {"prompt": "a", "response": ""}, {"prompt": 3, "response": "b"}, *questions(2)]
    found = issues(look, rows, checking={"on_bad_row": "skip"}, splitting={"duplicates": "ignore"})
    texts = [text for _, text in found]
    assert any(text.startswith("1 row (0.96%) left out: a value of another type") for text in texts), texts
    rows = [*questions(4), *questions(4)]
    found = issues(look, rows, splitting={"duplicates": "ignore", "validation": 0, "test": 0})
    assert ("note", "Rows of the splits that repeat another one: 4 of 8; left out: none.") in found


def test_one_class_far_larger_than_the_others_is_named(look: Look):
    rows = [{"text": str(index), "label": "yes" if index else "no"} for index in range(100)]
    found = issues(look, rows, checking={"format": "text_label"})
    assert any(text.startswith("Always answering 'yes' would be right for") for _, text in found), found


def test_a_last_step_that_the_run_never_makes_is_no_issues(look: Look):
    found = issues(look, effective_batch_rows=59, num_epochs=None, max_steps=1)
    assert not [words for _, words in found if "last step of every epoch" in words]


def test_classes_that_the_division_held_out_are_told_once(look: Look):
    rows = [{"text": f"{index % 7}{index}", "label": f"c{index}"} for index in range(30)]
    found = issues(look, rows, checking={"format": "text_label"}, splitting={"validation": 3, "test": 2})
    told = [words for _, words in found if "training row" in words]
    assert len(told) == 1
    assert told[0].startswith("Held-out rows of classes that no training row has: 5, of 5 classes in column 'label'")
