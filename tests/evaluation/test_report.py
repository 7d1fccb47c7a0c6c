"""The reports say what changed, show whole answers and cannot be broken by what a model writes."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from lm_tuning.evaluation.report import build_markdown, build_summary, describe_outcome, fence, shorten, split_shared

FACTS: dict[str, Any] = {"tuned_folder": "data/06_models/default/tuned_model", "tokens_per_second": 1234.5}


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
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    console.print(build_summary(result, **{**FACTS, **facts}))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def row_of(text: str, start: str) -> str:
    return " ".join(next(line for line in text.splitlines() if start in line).replace("│", "|").split())


def test_the_terminal_shows_figures_samples_and_the_next_steps(result: dict[str, Any]) -> None:
    text = print_summary(result)
    assert row_of(text, "Held-out loss") == "| Held-out loss (nats per token) | 4.0000 | 3.0000 | -25.0% |"
    assert row_of(text, "Perplexity") == "| Perplexity | 54.60 | 20.09 | -63.2% |"
    assert row_of(text, "ROUGE-L") == "| ROUGE-L (0 to 1) | 0.1000 | 0.2500 | +0.1500 |"
    assert "Test split: 128 rows, 4,321 supervised tokens, 3 answers of each model (2" in text
    assert "Function number 2" in text
    assert "Return the number 2." in text
    assert "[bold]no[/bold]" in text
    assert "1,234 tokens per second" in text
    assert "LoRA adapter: data/06_models/default/tuned_model" in text
    assert "make mlflow" in text
    assert "\x1b" not in text


def test_the_log_gets_the_outcome_in_one_line(result: dict[str, Any]) -> None:
    line = describe_outcome(result)
    assert "\n" not in line
    assert "Held-out loss (nats per token) 4.0000 -> 3.0000 (-25.0%)" in line


def test_unknown_speed_and_full_weights(result: dict[str, Any]) -> None:
    text = print_summary({**result, "tuned_method": "full"}, tokens_per_second=None)
    assert "per second" not in text
    assert "Tuned weights: data" in text


def test_markdown_has_the_table_and_every_sample(result: dict[str, Any]) -> None:
    text = build_markdown({**result, "warnings": ["something is stale"]}, **FACTS)
    assert "| Held-out loss (nats per token) | 4.0000 | 3.0000 | -25.0% |" in text
    assert "| ROUGE-L (0 to 1) | 0.1000 | 0.2500 | +0.1500 |" in text
    assert "> **Warning:** something is stale" in text
    assert [line for line in text.splitlines() if line.startswith("### ")] == ["### Row 1", "### Row 2", "### Row 3"]
    assert text.count("Be brief.") == 1
    assert text.count("*(empty)*") == 2
    assert "````text\n[bold]no[/bold] ```code```\n````" in text


def test_missing_rouge_is_a_dash(result: dict[str, Any]) -> None:
    for name in ("base", "tuned"):
        result[name] |= {"rouge_l": None, "num_generated": 0}
    result["improvement"]["rouge_l_difference"] = None
    result["samples"] = []
    text = build_markdown(result, **FACTS)
    assert "| ROUGE-L (0 to 1) | – | – | – |" in text  # noqa: RUF001
    assert "## Samples" not in text
    assert "answers" not in print_summary(result)


@pytest.mark.parametrize(("fraction", "shown"), [(0.0, "+0.0%"), (1e-5, "+0.0%"), (0.25, "-25.0%"), (-0.5, "+50.0%")])
def test_a_change_has_the_sign_of_what_happened(result: dict[str, Any], fraction: float, shown: str) -> None:
    result["improvement"]["nats_per_token_fraction"] = fraction
    assert f"| 3.0000 | {shown} |" in build_markdown(result, **FACTS)


def test_long_prompts_are_shortened_in_the_middle(result: dict[str, Any]) -> None:
    result["samples"][0]["prompt"] = "user\nfirst " + "x " * 5000 + "last\nassistant"
    for text in (build_markdown(result, **FACTS), print_summary(result)):
        assert "first x x" in text
        assert "x last" in text
        assert text.count("x") < 1000


def test_shorten_keeps_both_ends() -> None:
    assert shorten("abcdef", 6) == "abcdef"
    assert shorten("abcdefghij", 6) == "abc…ij"


def test_what_all_prompts_share_is_taken_off_in_whole_lines() -> None:
    prompts = ["system\nhello\nuser\ndef a(): 1\nassistant", "system\nhello\nuser\ndef b(): 1\nassistant"]
    assert split_shared(prompts) == ("system\nhello\nuser\n", ["def a(): 1", "def b(): 1"], "\nassistant")
    assert split_shared(["one\ntwo"]) == ("", ["one\ntwo"], "")
    assert split_shared(["same\n", "same\n"]) == ("", ["same\n", "same\n"], "")
    assert split_shared([]) == ("", [], "")
    assert split_shared(["abc", "abd"]) == ("", ["abc", "abd"], "")


def test_a_fence_is_longer_than_what_it_holds() -> None:
    assert fence("a") == "```text\na\n```"
    assert fence("````") == "`````text\n````\n`````"
