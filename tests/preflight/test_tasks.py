"""What preflight says of classes, and of sources and targets."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from lm_tuning.errors import UserError
from lm_tuning.preflight.figures import describe_preflight
from lm_tuning.preflight.report import compose_report
from lm_tuning.reporting.markdown import write_markdown
from tests.preflight.conftest import Look
from tests.support.tiny import make_tokenizer
from tests.text.conftest import add_around


def labelled(**counts: int) -> list[dict[str, str]]:
    """Make rows of 7 tokens, such as ``yes 001``."""
    return [
        {"text": f"{name[:3]} {index:03}", "label": name} for name, count in counts.items() for index in range(count)
    ]


def pairs(num_rows: int, *, answer: str = "sum") -> list[dict[str, str]]:
    """Make rows of 7 + 4 tokens with the usual answer, EOS tokens included."""
    return [{"prompt": f"doc{index:03}", "response": answer} for index in range(num_rows)]


def classify(look: Look, rows: list[dict[str, str]], **settings: Any) -> dict[str, Any]:
    task = {"task": "sequence_classification"}
    return look(
        rows, checking=task | settings.pop("checking", {}), tokenizing=task | settings.pop("tokenizing", {}), **settings
    )


def transduce(look: Look, rows: list[dict[str, str]], **settings: Any) -> dict[str, Any]:
    task = {"task": "seq2seq_lm"}
    tokenizer = settings.pop("tokenizer", None) or make_tokenizer(eos_token="<eos>")
    return look(rows, checking=task, tokenizing=task | settings.pop("tokenizing", {}), tokenizer=tokenizer, **settings)


@pytest.fixture
def classes(look: Look) -> dict[str, Any]:
    rows = labelled(yes=60, nope=30, maybe=10)
    strata = {"stratify": "label"}
    return classify(look, rows, checking=strata, splitting={"test": 30, **strata})


def test_figures_of_classes_speak_of_rows_and_classes(classes):
    assert json.loads(json.dumps(classes)) == classes
    assert classes["task"] == "sequence_classification"
    names = {"data_supervised_fraction", "data_end_learned_fraction"}
    assert not names & classes["metrics"].keys()
    assert classes["metrics"]["data_majority_fraction"] == 0.6
    assert classes["metrics"]["data_tokens_per_row_max"] == 7
    assert classes["metrics"]["data_steps_per_epoch"] == 35
    assert classes["schedule"]["supervised_tokens_per_step"]["max"] == 0
    assert list(classes["lengths"]["quantiles"]) == ["row"]
    assert (classes["labels"]["num_classes"], classes["labels"]["column"]) == (3, "label")
    assert classes["labels"]["classes"][0] == {"name": "yes", "train": 42, "validation": 0, "test": 18}
    assert classes["padding"]["batching"] == "packed", "classes pack"
    assert classes["concerns"] == []


def test_the_log_of_classes_names_the_largest(classes):
    assert describe_preflight(classes)[0] == (
        "Preflight: 100 rows read, 70 trained on; 35 steps and 490 tokens per epoch, 35 steps in all; 3 classes, the "
        "largest with 60.0% of the rows; padding 0.0% (packed)."
    )


def test_the_report_on_classes_shows_texts_classes_and_the_expected_loss(classes):
    report = compose_report(classes)
    assert ("classes", "3") in report.tiles
    assert "supervised tokens" not in dict(report.tiles)
    text = write_markdown(report)
    assert "7 tokens, class 'yes' (id 2)" in text
    assert "```text\nyes 000\n```" in text
    assert f"starts at a loss of about log(3) = {math.log(3):.2f} nats per row" in text
    assert "⟦" not in text
    for words in (
        "only read",
        "Does the model learn to stop",
        "Last supervised token",
        "supervised tokens",
        "of them supervised",
    ):
        assert words not in text, words


def test_rows_that_tokenizing_drops_do_not_count_for_their_class(look: Look):
    rows = [*labelled(yes=10, nope=10), {"text": "x" * 100, "label": "long"}]
    figures = classify(look, rows, tokenizing={"truncation": "drop"})
    assert figures["labels"]["num_rows"] == 20
    assert figures["labels"]["not_in_train"] == figures["labels"]["in_no_split"] == ["long"]
    assert figures["labels"]["num_held_out_missing"] == 3
    texts = [issue["text"] for issue in figures["concerns"]]
    assert "Classes without a training row (1) cannot be learned: 'long'." in texts
    assert not [issue for issue in figures["concerns"] if "take those rows out" in str(issue)]
    assert "1 row dropped in tokenizing (train): longer than tokenize.max_length_tokens." in texts


def test_texts_that_are_cut_are_named_and_judged_by_their_share(look: Look):
    rows = [*labelled(yes=60, nope=60), {"text": "yes " + "x" * 30, "label": "yes"}]
    figures = classify(look, rows, tokenizing={"max_length_tokens": 20})
    cut = next(issue for issue in figures["concerns"] if issue["section"] == "lengths")
    assert cut == {
        "level": "note",
        "section": "lengths",
        "text": "The text is cut in 1 training row (0.83%) by tokenize.max_length_tokens=20.",
        "advice": "tokenize.max_length_tokens=32 would cut 1 row, if model and memory allow.",
    }


def test_uneven_classes_come_with_the_parameter_that_weighs_them(look: Look):
    figures = classify(look, labelled(yes=99, nope=1))
    [issue] = [issue for issue in figures["concerns"] if issue["section"] == "labels"
                 and issue["text"].startswith("Always answering 'yes'")]  # fmt: skip
    assert "train.class_weights=balanced" in issue["advice"]


def test_padding_with_the_eos_is_told_in_terms_of_classes(look: Look):
    figures = classify(look, labelled(yes=9, nope=9), tokenizer=make_tokenizer(pad_token="<|end|>"))
    judged = {item["question"]: item for item in figures["special_tokens"]["judgements"]}
    assert list(judged) == ["Is padding told apart from the end?", "Does each row begin once?"]
    assert "the class is read at the last token" in judged["Is padding told apart from the end?"]["answer"]


def test_figures_of_pairs_tell_sources_and_targets_apart(look: Look):
    figures = transduce(look, [*pairs(60), {"prompt": "x" * 19, "response": "y" * 9}], splitting={"test": 21})
    assert json.loads(json.dumps(figures)) == figures
    metrics = figures["metrics"]
    sides = ("source", "target")
    assert set(metrics) >= {f"data_tokens_per_{side}_{name}" for side in sides for name in ("mean", "p99", "max")}
    quantiles = figures["lengths"]["quantiles"]
    assert (quantiles["source"]["p50"], quantiles["target"]["p50"], quantiles["row"]["p50"]) == (7, 4, 11)
    assert (
        metrics["data_supervised_fraction"]
        == figures["lengths"]["num_supervised_tokens"] / metrics["data_tokens_per_epoch"]
    )
    assert metrics["data_end_learned_fraction"] == 1
    assert figures["schedule"]["steps_per_epoch"] == 20
    assert figures["padding"]["batching"] == "padded", "nothing is packed on a CPU either"
    assert [choice["name"] for choice in figures["padding"]["choices"]] == ["fixed", "longest_row", "random", "padded"]
    fixed = figures["padding"]["choices"][0]["padding_fraction"]
    assert fixed == pytest.approx(1 - metrics["data_tokens_per_epoch"] / (40 * (64 + 128)))
    assert figures["lengths"]["max_target_tokens"] == 128


def test_an_even_step_of_pairs_has_no_padding(look: Look):
    padding = transduce(look, pairs(8))["padding"]
    assert padding["choices"][-1] == {"name": "padded", "padding_fraction": 0.0, "micro_batches_per_step": 1.0}
    with pytest.raises(UserError, match=r"train\.batching: packed cannot be used with task: seq2seq_lm"):
        transduce(look, pairs(8), batching="packed")


def test_the_report_on_pairs_has_a_table_for_each_limit(look: Look):
    figures = transduce(look, pairs(8), tokenizing={"max_target_tokens": 4})
    text = write_markdown(compose_report(figures))
    assert "7 tokens of source, 4 of target" in text
    assert "doc000<eos>⟦sum<eos>⟧" in text
    assert "### What another `tokenize.max_length_tokens` would cut" in text
    assert "### What another `tokenize.max_target_tokens` would cut" in text
    assert "and 8 targets as long as `tokenize.max_target_tokens: 4` allows" in text
    assert "every source to the longest, every target to the longest" in text
    assert "packed" not in text
    assert "Rows of the chat" not in text
    assert "of the tokens supervised" in describe_preflight(figures)[0]


def test_cut_targets_are_worse_than_cut_sources(look: Look):
    rows = [*pairs(199), {"prompt": "x" * 40, "response": "y" * 20}]
    figures = transduce(look, rows, tokenizing={"max_length_tokens": 20, "max_target_tokens": 10})
    found = {issue["text"]: issue for issue in figures["concerns"] if issue["section"] == "lengths"}
    source = found["The source is cut in 1 training row (0.50%) by tokenize.max_length_tokens=20."]
    assert source["level"] == "note"
    target = found[
        "The end of the target is cut in 1 training row (0.50%) by tokenize.max_target_tokens=10: the model learns to "
        "stop in the middle."
    ]
    assert target["level"] == "warning"
    assert target["advice"] == "tokenize.max_target_tokens=16 would cut 1 row, if model and memory allow."


def test_dropped_targets_come_with_the_limit_that_holds_them(look: Look):
    rows = [*pairs(99), {"prompt": "x", "response": "y" * 20}]
    figures = transduce(look, rows, tokenizing={"max_target_tokens": 10, "truncation": "drop"})
    [issue] = [issue for issue in figures["concerns"] if "target longer than" in issue["text"]]
    assert issue["advice"].startswith("tokenize.max_target_tokens=16 would cut 1 row")


def test_each_side_has_its_own_room_in_the_model(look: Look):
    rows = [*pairs(9), {"prompt": "x" * 400, "response": "y" * 400}]
    limits = {"max_length_tokens": 500, "max_target_tokens": 500}
    figures = transduce(look, rows, tokenizing=limits)
    assert not [issue for issue in figures["concerns"] if "the model is made for" in issue["text"]]
    tokenizer = make_tokenizer(eos_token="<eos>")
    tokenizer.model_max_length = 300
    figures = transduce(look, rows, tokenizing=limits, tokenizer=tokenizer)
    found = [issue["advice"] for issue in figures["concerns"] if "the model is made for 300" in issue["text"]]
    assert found == [f"Set tokenize.{name} to 300 at most." for name in limits]


@pytest.mark.parametrize(
    ("pattern", "num_begin", "is_added"), [("$A <eos>", 0, False), ("<bos> $A <eos>", 8, True)], ids=["bare", "bart"]
)
def test_beginning_and_end_of_both_sides_are_judged(look: Look, pattern: str, num_begin: int, is_added: bool):
    tokenizer = add_around(make_tokenizer(eos_token="<eos>"), pattern)
    facts = transduce(look, pairs(8), tokenizer=tokenizer)["special_tokens"]
    for side in ("bos", "target_bos"):
        assert facts[side]["num_rows_beginning_with"] == num_begin
        assert facts[side]["num_rows_with_one_later"] == 0, "the other side's is not its own"
        assert facts[side]["added_by_tokenizer"] is is_added
    assert facts["num_sources_ended"] == 8
    assert {item["question"]: item["verdict"] for item in facts["judgements"]} == dict.fromkeys(
        [
            "Is padding told apart from the end?",
            "Does the model learn to stop?",
            "Does each source end?",
            "Does each source begin once?",
            "Does each target begin once?",
        ],
        "good",
    )
