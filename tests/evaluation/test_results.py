"""The reports say what changed, show whole answers and cannot be broken by what a model writes."""

from __future__ import annotations

from typing import Any

import pytest

from lm_tuning.evaluation.answer_report import split_shared
from lm_tuning.evaluation.report import describe_outcome
from lm_tuning.reporting.text import keep_ends
from tests.evaluation.reports import as_markdown, on_terminal

FACTS: dict[str, Any] = {"tuned_folder": "data/06_models/default/tuned_model", "tokens_per_second": 1234.5}
SPEEDS = {"samples_per_second": 17.5, "steps_per_second": 0.5}


@pytest.fixture
def result() -> dict[str, Any]:
    figures = {"rouge_1": 0.2, "rouge_2": 0.1, "num_tokens": 4321, "num_generated": 3, "num_empty": 0}
    samples = [
        {
            "row_id": number,
            "prompt": f"system\nBe brief.\nuser\nFunction number {number}\nassistant",
            "reference": f"Return {number}.",
            "base": "[bold]no[/bold] ```code```" if number == 1 else "",
            "tuned": f"Return the number {number}.",
        }
        for number in (1, 2, 3)
    ]
    return {
        "split": "test",
        "task": "causal_lm",
        "num_rows": 128,
        "num_split_rows": 128,
        "base": {**figures, "nats_per_token": 4.0, "perplexity": 54.598, "rouge_l": 0.1, "num_empty": 2},
        "tuned": {**figures, "nats_per_token": 3.0, "perplexity": 20.0855, "rouge_l": 0.25},
        "improvement": {"nats_per_token_fraction": 0.25, "perplexity_fraction": 0.632, "rouge_l_difference": 0.15},
        "samples": samples,
        "tuned_method": "lora",
        "tokens_key": "key1",
        "warnings": [],
        "skipped": None,
    }


def print_summary(result: dict[str, Any], **facts: Any) -> str:
    return on_terminal(result, **{**FACTS, **facts})


def row_of(text: str, start: str) -> str:
    return " ".join(next(line for line in text.splitlines() if start in line).replace("│", "|").split())


def test_the_terminal_shows_figures_samples_and_the_next_steps(result: dict[str, Any]) -> None:
    text = print_summary(result, **SPEEDS)
    assert row_of(text, "Held-out loss") == "| Held-out loss (nats per token) | 4.0000 | 3.0000 | -25.0% |"
    assert row_of(text, "Perplexity") == "| Perplexity | 54.60 | 20.09 | -63.2% |"
    assert row_of(text, "ROUGE-L") == "| ROUGE-L (0 to 1) | 0.1000 | 0.2500 | +0.1500 |"
    assert "Test split: 128 rows, 4,321 supervised tokens, 3 answers of each model (2" in text
    assert "Function number 2" in text
    assert "Return the number 2." in text
    assert "[bold]no[/bold]" in text
    assert "1,234 tokens per second, 17.5 samples per second, 0.5000 steps per second" in text
    assert "LoRA adapter: data/06_models/default/tuned_model" in text
    assert "make mlflow" in text
    assert "\x1b" not in text


def test_the_log_gets_the_outcome_in_one_line(result: dict[str, Any]) -> None:
    line = describe_outcome(result)
    assert "\n" not in line
    assert "Held-out loss (nats per token) 4.0000 -> 3.0000 (-25.0%)" in line


def test_other_methods_are_named(result: dict[str, Any]) -> None:
    assert "QLoRA adapter: data" in print_summary({**result, "tuned_method": "qlora"})


def test_unknown_speed_and_full_weights(result: dict[str, Any]) -> None:
    text = print_summary({**result, "tuned_method": "full"}, tokens_per_second=None)
    assert "per second" not in text
    assert "Tuned weights: data" in text


def test_markdown_has_the_table_and_every_sample(result: dict[str, Any]) -> None:
    text = as_markdown({**result, "warnings": ["something is stale"]}, **FACTS)
    assert "| Held-out loss (nats per token) | 4.0000 | 3.0000 | -25.0% |" in text
    assert "| ROUGE-L (0 to 1) | 0.1000 | 0.2500 | +0.1500 |" in text
    assert "- **Warning**: something is stale" in text
    assert [line for line in text.splitlines() if line.startswith("### ")] == ["### Row 1", "### Row 2", "### Row 3"]
    assert text.count("Be brief.") == 1
    assert text.count("*(empty)*") == 2
    assert "````text\n[bold]no[/bold] ```code```\n````" in text


def test_without_answers_there_is_no_rouge_but_its_reason(result: dict[str, Any]) -> None:
    for name in ("base", "tuned"):
        result[name] |= {"rouge_l": None, "num_generated": 0}
    result["improvement"]["rouge_l_difference"] = None
    result["samples"] = []
    result["no_answers"] = "the rows have no prompt to answer"
    for text in (as_markdown(result, **FACTS), print_summary(result), describe_outcome(result)):
        assert "4,321 supervised tokens. No ROUGE, since the rows have no prompt to answer." in text.replace("\n", " ")
        assert "ROUGE-L" not in text
    assert "## Samples" not in as_markdown(result, **FACTS)


@pytest.mark.parametrize(
    ("fraction", "shown"),
    [
        (0.0, "0.0%"),
        (-0.0, "0.0%"),
        (1e-9, "0.0%"),
        (1e-5, "-0.001%"),
        (-1e-5, "+0.001%"),
        (8.7e-5, "-0.01%"),
        (0.25, "-25.0%"),
        (-0.5, "+50.0%"),
    ],
)
def test_a_change_has_the_sign_of_what_happened(result: dict[str, Any], fraction: float, shown: str) -> None:
    result["improvement"]["nats_per_token_fraction"] = fraction
    assert f"| 3.0000 | {shown} |" in as_markdown(result, **FACTS)


@pytest.mark.parametrize(("value", "shown"), [(0.0, "0.0000"), (0.25, "+0.2500"), (-0.00002, "-0.00002")])
def test_a_difference_has_the_sign_of_what_happened(result: dict[str, Any], value: float, shown: str) -> None:
    result["improvement"]["rouge_l_difference"] = value
    assert f" | {shown} |" in as_markdown(result, **FACTS)


def test_long_prompts_are_shortened_in_the_middle(result: dict[str, Any]) -> None:
    result["samples"][0]["prompt"] = "user\nfirst " + "x " * 5000 + "last\nassistant"
    for text in (as_markdown(result, **FACTS), print_summary(result)):
        assert "first x x" in text
        assert "x last" in text
        assert text.count("x") < 1000


def test_both_ends_are_kept() -> None:
    assert keep_ends("abcdef", 6) == "abcdef"
    assert keep_ends("abcdefghij", 6) == "abc…ij"


def test_what_all_prompts_share_is_taken_off_in_whole_lines() -> None:
    prompts = ["system\nhello\nuser\ndef a(): 1\nassistant", "system\nhello\nuser\ndef b(): 1\nassistant"]
    assert split_shared(prompts) == ("system\nhello\nuser\n", ["def a(): 1", "def b(): 1"], "\nassistant")
    assert split_shared(["one\ntwo"]) == ("", ["one\ntwo"], "")
    assert split_shared(["same\n", "same\n"]) == ("", ["same\n", "same\n"], "")
    assert split_shared([]) == ("", [], "")
    assert split_shared(["abc", "abd"]) == ("", ["abc", "abd"], "")


@pytest.fixture
def class_result() -> dict[str, Any]:
    """Thirty classes, of which the n-th worst has an F1 of n / 30."""
    return {
        "split": "test",
        "task": "sequence_classification",
        "num_rows": 300,
        "num_split_rows": 3080,
        "base": {"accuracy": 0.05, "macro_f1": 0.003, "nats_per_row": 3.4, "class": "class_7", "num_tied_classes": 1},
        "tuned": {"accuracy": 0.91, "macro_f1": 0.9, "nats_per_row": 0.34},
        "improvement": {"accuracy_difference": 0.86, "macro_f1_difference": 0.897, "nats_per_row_fraction": 0.9},
        "per_class": [
            {
                "class": f"class_{number}",
                "num_rows": 10,
                "num_predicted": 0 if number == 0 else 9,
                "precision": None if number == 0 else 0.5,
                "recall": number / 30,
                "f1": number / 30,
            }
            for number in range(30)
        ],
        "confusions": [{"reference": "class_0", "predicted": "a|b [x]", "num_rows": 1234, "fraction": 0.25}],
        "class_shares": [{"class": "class_9", "num_train_rows": 20, "num_rows": 54}],
        "calibration_bins": [],
        "coverage": [],
        "likely_mislabelled": [],
        "hardest": [],
        "top_k": "",
        "num_train_rows": 600,
        "best_constant": {"accuracy": 0.18, "macro_f1": 0.01, "class": "class_9", "num_tied_classes": 1},
        "samples": [
            {
                "row_id": 7,
                "text": "what [bold]is[/bold] ```this```",
                "reference": "class_0",
                "base": "class_7",
                "tuned": "class_1",
                "probability": 0.876,
            },
            {
                "row_id": 8,
                "text": "fine",
                "reference": "class_2",
                "base": "class_7",
                "tuned": "class_2",
                "probability": 0.5,
            },
        ],
        "tuned_method": "full",
        "tokens_key": "key1",
        "warnings": ["something is odd"],
        "skipped": None,
    }


def test_markdown_has_every_class_and_confusion(class_result: dict[str, Any]) -> None:
    text = as_markdown(class_result, **FACTS)
    assert "Test split: 300 of 3,080 rows, 30 classes in them or predicted." in text
    assert "|  | Majority class | Tuned | Change |" in text
    assert "| Accuracy (0 to 1) | 0.0500 | 0.9100 | +0.8600 |" in text
    assert "| Macro-F1 (0 to 1) | 0.0030 | 0.9000 | +0.8970 |" in text
    assert "| Held-out loss (nats per row) | 3.4000 | 0.3400 | -90.0% |" in text
    assert "| class_0 | 10 | 0 | – | 0.0000 | 0.0000 |" in text  # noqa: RUF001
    assert sum(line.startswith("| class_") for line in text.splitlines()) == 30 + 2, "and a confusion and a share"
    assert r"| class_0 | a\|b \[x\] | 1,234 | 25.0% |" in text
    assert "### Row 7: class_0, taken for class_1 (probability 0.88)" in text
    assert "### Row 8: class_2, rightly (probability 0.50)" in text
    assert "````text\nwhat [bold]is[/bold] ```this```\n````" in text
    assert "- **Warning**: something is odd" in text


def test_the_terminal_shows_the_twenty_worst_classes(class_result: dict[str, Any]) -> None:
    text = print_summary(class_result)
    assert row_of(text, "Accuracy") == "| Accuracy (0 to 1) | 0.0500 | 0.9100 | +0.8600 |"
    assert row_of(text, "class_19 ") == "| class_19 | 10 | 9 | 0.5000 | 0.6333 | 0.6333 |"
    assert "class_20 " not in text
    assert "10 more in the stored report" in text
    assert row_of(text, "a|b [x]").startswith("| class_0 | a|b [x] | 1,234 | 25.0% |")
    assert "what [bold]is[/bold] ```this```" in text
    assert "class_0, taken for class_1 (probability 0.88)" in text
    assert "Warning: something is odd" in text
    assert "Accuracy (0 to 1) 0.0500 -> 0.9100 (+0.8600)" in describe_outcome(class_result)


def test_constant_answers_and_the_largest_classes_are_shown(class_result: dict[str, Any]) -> None:
    class_result["base"]["num_tied_classes"] = 30
    text = as_markdown(class_result, **FACTS)
    tied = "class_7, one of 30 equally frequent classes"
    assert f"of the training rows is {tied}; always answering it is right for 5.00%." in text
    assert "The best constant answer on this split is class_9, right for 18.00%." in text
    assert f"| training rows | {tied} | 0.0500 | 0.0030 |\n| these test rows | class_9 | 0.1800 | 0.0100 |" in text
    assert "| class_9 | 20 | 3.33% | 54 | 18.00% |" in text
    assert "Largest classes in train and test" in print_summary(class_result)


def test_nothing_wrong_shows_no_confusions(class_result: dict[str, Any]) -> None:
    class_result["confusions"] = []
    assert "confusions" not in as_markdown(class_result, **FACTS)
    assert "confusions" not in print_summary(class_result)


def test_the_verdict_comes_first_and_a_missed_bound_last_on_the_terminal(result: dict[str, Any]) -> None:
    from lm_tuning.evaluation.statistics.gate import check_gate
    from lm_tuning.evaluation.statistics.outcomes import judge_scores, write_verdict
    from lm_tuning.evaluation.statistics.scored_rows import mean_of_rows

    base, tuned = (
        mean_of_rows("rouge_l", [value + n % 5 / 50 for n in range(40)], range(40), title="ROUGE-L", signature="tok:x")
        for value in (0.1, 0.25)
    )
    scores = judge_scores({"rouge_l": (base, tuned)}, seed=1)
    judged = {
        **result,
        "scores": scores,
        "verdict": write_verdict(scores[0]),
        "gate": check_gate({"rouge_l": 0.9}, scores, {}),
        "earlier_run": None,
    }
    text = as_markdown(judged)
    assert (
        text.index("**Better by 0.1") < text.index("Test split: 128 rows") < text.index("## Scores with 95 % intervals")
    )
    assert "ROUGE-L: `tok:x`" in text
    shown = print_summary(judged, **SPEEDS)
    assert shown.index("Better by 0.1") < shown.index("Test split: 128 rows")
    assert shown.rindex("evaluate.gate.rouge_l not reached") > shown.index("Scores with 95 % intervals")
    assert "tok:x" not in shown, "signatures are for the files"
