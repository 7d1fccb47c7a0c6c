"""What the reports say about two language models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lm_tuning.reporting.text import (
    ANSWER_CHARACTERS,
    PROMPT_CHARACTERS,
    Block,
    Line,
    compare,
    shorten,
    split_shared,
)
from lm_tuning.wording import count_of, fence, on_one_line

HEADINGS = ("Base", "Tuned")


def list_figures(result: dict[str, Any]) -> list[Line]:
    """Choose and format the figures that the reports show.

    Args:
        result: what ``evaluate_models`` gives as ``result``.
    """
    return [
        compare(result, "nats_per_token", "Held-out loss (nats per token)"),
        compare(result, "perplexity", "Perplexity", decimals=2),
        compare(result, "rouge_l", "ROUGE-L (0 to 1)", as_difference=True),
    ]


def describe_rows(result: dict[str, Any]) -> str:
    """Say in one sentence what was measured on what."""
    base, tuned, split = result["base"], result["tuned"], result["split"].capitalize()
    token = "target token" if result["task"] == "seq2seq_lm" else "supervised token"
    sentence = f"{split} split: {count_of(result['num_rows'], 'row')}, {count_of(base['num_tokens'], token)}"
    if base["num_generated"]:
        sentence += f", {count_of(base['num_generated'], 'answer')} of each model"
        if result.get("generation", "greedy") != "greedy":
            sentence += f" by {result['generation']}"
        if base["num_empty"] or tuned["num_empty"]:
            sentence += f" ({base['num_empty']:,} empty from base, {tuned['num_empty']:,} from tuned)"
    return sentence + "."


def list_blocks(result: dict[str, Any]) -> list[Block]:
    """Return the tables below the figures; language models have none."""
    return []


def write_samples(result: dict[str, Any]) -> Iterator[str]:
    """Write the samples as Markdown, line by line."""
    shared, questions, ending = split_shared([sample["prompt"] for sample in result["samples"]])
    if shared or ending:
        yield from ("What all these prompts begin and end with is shown once:", "", fence(f"{shared}…{ending}"), "")
    for sample, question in zip(result["samples"], questions, strict=True):
        yield from (f"### Row {sample['row_id']}", "", fence(shorten(question, PROMPT_CHARACTERS)), "")
        for title in ("reference", "base", "tuned"):
            text = shorten(sample[title], ANSWER_CHARACTERS)
            yield from (f"**{title.capitalize()}**", "", fence(text) if text else "*(empty)*", "")


def list_samples(result: dict[str, Any]) -> Iterator[list[tuple[str, str]]]:
    """Return each sample as titled lines for the terminal."""
    _, questions, _ = split_shared([sample["prompt"] for sample in result["samples"]])
    for sample, question in zip(result["samples"], questions, strict=True):
        answers = [(title.capitalize(), on_one_line(sample[title])) for title in ("reference", "base", "tuned")]
        yield [("Prompt", on_one_line(question)), *answers]
