"""Show a comparison: as Markdown to keep, and as a short table for the terminal."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

MLFLOW_COMMAND = "make mlflow"
PROMPT_CHARACTERS = 400
ANSWER_CHARACTERS = 400
TERMINAL_SAMPLES = 3
TERMINAL_CHARACTERS = 200


@dataclass(frozen=True)
class Line:
    """One quantity of the table, ready to print.

    Attributes:
        name: quantity and unit.
        base: value of the base model.
        tuned: value of the tuned model.
        change: what tuning changed.
    """

    name: str
    base: str
    tuned: str
    change: str


def list_figures(result: dict[str, Any]) -> list[Line]:
    """Choose and format the figures that the reports show.

    Args:
        result: what ``evaluate_models`` gives as ``result``.
    """
    base, tuned, improvement = result["base"], result["tuned"], result["improvement"]
    return [
        Line(
            "Held-out loss (nats per token)",
            _number(base["nats_per_token"], 4),
            _number(tuned["nats_per_token"], 4),
            _percent(improvement["nats_per_token_fraction"]),
        ),
        Line(
            "Perplexity",
            _number(base["perplexity"], 2),
            _number(tuned["perplexity"], 2),
            _percent(improvement["perplexity_fraction"]),
        ),
        Line(
            "ROUGE-L (0 to 1)",
            _number(base["rouge_l"], 4),
            _number(tuned["rouge_l"], 4),
            _difference(improvement["rouge_l_difference"]),
        ),
    ]


def build_markdown(result: dict[str, Any], *, tuned_folder: str, tokens_per_second: float | None) -> str:
    """Write the comparison as Markdown.

    Args:
        result: what ``evaluate_models`` gives as ``result``.
        tuned_folder: where the tuned model lies.
        tokens_per_second: training speed; ``None`` when unknown.
    """
    parts = ["# Evaluation", ""]
    closing = _closing(result, tuned_folder, tokens_per_second)
    if result["skipped"]:
        return "\n".join([*parts, f"Skipped. {result['skipped']}", "", *closing])
    for warning in result["warnings"]:
        parts += [f"> **Warning:** {warning}", ""]
    parts += [
        describe_rows(result),
        "",
        "| | Base | Tuned | Change |",
        "| --- | ---: | ---: | ---: |",
        *(f"| {line.name} | {line.base} | {line.tuned} | {line.change} |" for line in list_figures(result)),
        "",
        *closing,
    ]
    if not result["samples"]:
        return "\n".join(parts)
    shared, questions, ending = split_shared([sample["prompt"] for sample in result["samples"]])
    parts += ["## Samples", ""]
    if shared or ending:
        parts += ["What all these prompts begin and end with is shown once:", "", fence(f"{shared}…{ending}"), ""]
    for sample, question in zip(result["samples"], questions, strict=True):
        parts += [f"### Row {sample['row_id']}", "", fence(shorten(question, PROMPT_CHARACTERS)), ""]
        for title in ("reference", "base", "tuned"):
            text = shorten(sample[title], ANSWER_CHARACTERS)
            parts += [f"**{title.capitalize()}**", "", fence(text) if text else "*(empty)*", ""]
    return "\n".join(parts)


def build_summary(result: dict[str, Any], *, tuned_folder: str, tokens_per_second: float | None) -> RenderableType:
    """Build what the terminal shows at the end of a run.

    Args:
        result: what ``evaluate_models`` gives as ``result``.
        tuned_folder: where the tuned model lies.
        tokens_per_second: training speed; ``None`` when unknown.
    """
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    closing = [
        Text(line.replace("`", "").removeprefix("- ")) for line in _closing(result, tuned_folder, tokens_per_second)
    ]
    if result["skipped"]:
        return Group(Text(f"Evaluation skipped. {result['skipped']}"), *closing)
    table = Table()
    table.add_column("")
    for column in ("Base", "Tuned", "Change"):
        table.add_column(column, justify="right")
    for line in list_figures(result):
        table.add_row(line.name, line.base, line.tuned, line.change)
    parts: list[RenderableType] = [Text(describe_rows(result)), table]
    shown = result["samples"][:TERMINAL_SAMPLES]
    _, questions, _ = split_shared([sample["prompt"] for sample in result["samples"]])
    for sample, question in zip(shown, questions, strict=False):
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row("Prompt", Text(shorten(_on_one_line(question), TERMINAL_CHARACTERS)))
        for title in ("reference", "base", "tuned"):
            # Text, not markup: an answer may hold square brackets.
            answer = shorten(_on_one_line(sample[title]), TERMINAL_CHARACTERS)
            grid.add_row(title.capitalize(), Text(answer or "(empty)"))
        parts.append(Padding(grid, (1, 0, 0, 0)))
    parts += [Text(f"Warning: {warning}", style="yellow") for warning in result["warnings"]]
    return Group(*parts, Text(""), *closing)


def describe_outcome(result: dict[str, Any]) -> str:
    """Say the outcome in one line for the log.

    Args:
        result: what ``evaluate_models`` gives as ``result``.
    """
    if result["skipped"]:
        return f"Evaluation skipped. {result['skipped']}"
    changes = [f"{line.name} {line.base} -> {line.tuned} ({line.change})" for line in list_figures(result)]
    return f"{describe_rows(result)} {'; '.join(changes)}."


def describe_rows(result: dict[str, Any]) -> str:
    """Say in one sentence what was measured on what."""
    base, tuned, split = result["base"], result["tuned"], result["split"].capitalize()
    sentence = f"{split} split: {result['num_rows']:,} rows, {base['num_tokens']:,} supervised tokens"
    if base["num_generated"]:
        sentence += f", {base['num_generated']:,} answers of each model"
        if base["num_empty"] or tuned["num_empty"]:
            sentence += f" ({base['num_empty']:,} empty from base, {tuned['num_empty']:,} from tuned)"
    return sentence + "."


def shorten(text: str, max_characters: int) -> str:
    """Cut a long text in the middle, since both its start and its end tell what it is.

    Args:
        text: any text.
        max_characters: most characters of the result, at least 2.
    """
    if len(text) <= max_characters:
        return text
    end = max_characters // 3
    return text[: max_characters - end - 1] + "…" + text[-end:]


def split_shared(prompts: Sequence[str]) -> tuple[str, list[str], str]:
    """Take off the lines that all prompts begin and end with: the template's, and a fixed instruction.

    Args:
        prompts: decoded prompts.

    Returns:
        The shared start and end, in whole lines, and what lies between them in each prompt. Nothing is shared by a
        single prompt.
    """
    if len(set(prompts)) < 2:
        return "", list(prompts), ""
    start = _whole_lines(os.path.commonprefix(list(prompts)))
    rests = [prompt[len(start) :] for prompt in prompts]
    ending = _whole_lines(os.path.commonprefix([rest[::-1] for rest in rests]))[::-1]
    return start, [rest[: len(rest) - len(ending)] for rest in rests], ending


def fence(text: str) -> str:
    """Set a text in a Markdown block that no backticks inside it can end."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    mark = "`" * max(3, longest + 1)
    return f"{mark}text\n{text}\n{mark}"


def _closing(result: dict[str, Any], tuned_folder: str, tokens_per_second: float | None) -> list[str]:
    what = "LoRA adapter" if result["tuned_method"] == "lora" else "Tuned weights"
    lines = [] if tokens_per_second is None else [f"- Training speed: {tokens_per_second:,.0f} tokens per second"]
    return [*lines, f"- {what}: `{tuned_folder}`", f"- All runs in the MLflow UI: `{MLFLOW_COMMAND}`", ""]


def _whole_lines(text: str) -> str:
    """Cut a text after its last line break."""
    return text[: text.rfind("\n") + 1]


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"  # noqa: RUF001


def _percent(improvement: float | None) -> str:
    """Show a fall of a quantity as a negative change, and no change without a minus."""
    return "–" if improvement is None else f"{round(-improvement, 3) + 0.0:+.1%}"  # noqa: RUF001


def _difference(value: float | None) -> str:
    return "–" if value is None else f"{value:+.4f}"  # noqa: RUF001
