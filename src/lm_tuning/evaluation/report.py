"""Show a comparison: as Markdown to keep, and as a short table for the terminal."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from lm_tuning.evaluation import class_report, language_report
from lm_tuning.reporting.text import (
    TERMINAL_CHARACTERS,
    TERMINAL_SAMPLES,
    Block,
    shorten,
)
from lm_tuning.runtime.log_records import protect
from lm_tuning.training.step_log import write_speed
from lm_tuning.wording import code_span, escape_markdown

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

MLFLOW_COMMAND = "make mlflow"
TERMINAL_ROWS = 20
"""Rows of a table that the terminal shows; Markdown has all."""


def build_markdown(
    result: dict[str, Any], *, tuned_folder: str, tokens_per_second: float | None, **speeds: float | None
) -> str:
    """Write the comparison as Markdown.

    Args:
        result: what ``evaluate_models`` gives as ``result``.
        tuned_folder: where the tuned model lies.
        tokens_per_second: training speed; ``None`` when unknown.
        **speeds: ``samples_per_second`` and ``steps_per_second``, of the same time.
    """
    parts = ["# Evaluation", ""]
    closing = _closing(result, tuned_folder, tokens_per_second=tokens_per_second, **speeds)
    if result["skipped"]:
        return "\n".join([*parts, f"Skipped. {escape_markdown(result['skipped'])}", "", *closing])
    content = _content(result)
    for warning in result["warnings"]:
        parts += [f"> **Warning:** {escape_markdown(warning)}", ""]
    base, tuned = content.HEADINGS
    parts += [
        escape_markdown(content.describe_rows(result)),
        "",
        f"| | {base} | {tuned} | Change |",
        "| --- | ---: | ---: | ---: |",
        *(f"| {line.name} | {line.base} | {line.tuned} | {line.change} |" for line in content.list_figures(result)),
        "",
        *closing,
    ]
    for block in content.list_blocks(result):
        parts += [f"## {escape_markdown(block.title)}", "", *_write_block(block), ""]
    if result["samples"]:
        parts += ["## Samples", "", *content.write_samples(result)]
    return "\n".join(parts)


def build_summary(
    result: dict[str, Any], *, tuned_folder: str, tokens_per_second: float | None, **speeds: float | None
) -> RenderableType:
    """Build what the terminal shows at the end of a run.

    Args:
        result: what ``evaluate_models`` gives as ``result``.
        tuned_folder: where the tuned model lies.
        tokens_per_second: training speed; ``None`` when unknown.
        **speeds: ``samples_per_second`` and ``steps_per_second``, of the same time.
    """
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table

    closing = [
        _plain(line.replace("`", "").removeprefix("- "))
        for line in _closing(result, tuned_folder, tokens_per_second=tokens_per_second, **speeds)
    ]
    if result["skipped"]:
        return Group(_plain(f"Evaluation skipped. {result['skipped']}"), *closing)
    content = _content(result)
    table = Table()
    table.add_column("")
    for column in (*content.HEADINGS, "Change"):
        table.add_column(column, justify="right")
    for line in content.list_figures(result):
        table.add_row(*map(_plain, (line.name, line.base, line.tuned, line.change)))
    parts: list[RenderableType] = [_plain(content.describe_rows(result)), table]
    parts += [_build_table(block) for block in content.list_blocks(result)]
    for sample in list(content.list_samples(result))[:TERMINAL_SAMPLES]:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(overflow="fold")
        for title, text in sample:
            grid.add_row(title, _plain(shorten(text, TERMINAL_CHARACTERS) or "(empty)"))
        parts.append(Padding(grid, (1, 0, 0, 0)))
    parts += [_plain(f"Warning: {warning}", style="yellow") for warning in result["warnings"]]
    return Group(*parts, _plain(""), *closing)


def describe_outcome(result: dict[str, Any]) -> str:
    """Say the outcome in one line for the log.

    Args:
        result: what ``evaluate_models`` gives as ``result``.
    """
    if result["skipped"]:
        return f"Evaluation skipped. {result['skipped']}"
    content = _content(result)
    changes = [f"{line.name} {line.base} -> {line.tuned} ({line.change})" for line in content.list_figures(result)]
    return f"{content.describe_rows(result)} {'; '.join(changes)}."


def _content(result: dict[str, Any]) -> ModuleType:
    return class_report if result["task"] == "sequence_classification" else language_report


def _closing(result: dict[str, Any], tuned_folder: str, **speeds: float | None) -> list[str]:
    what = {"lora": "LoRA adapter", "qlora": "QLoRA adapter"}.get(result["tuned_method"], "Tuned weights")
    known = {name.removesuffix("_per_second"): speed for name, speed in speeds.items() if speed is not None}
    said = ", ".join(f"{write_speed(speed)} {unit} per second" for unit, speed in known.items())
    lines = [f"- Training speed: {said}"] if said else []
    return [*lines, f"- {what}: {code_span(tuned_folder)}", f"- All runs in the MLflow UI: `{MLFLOW_COMMAND}`", ""]


def _write_block(block: Block) -> list[str]:
    num_numbers = len(block.columns) - block.num_text_columns
    return [
        f"| {' | '.join(block.columns)} |",
        f"| {' | '.join(['---'] * block.num_text_columns + ['---:'] * num_numbers)} |",
        *(f"| {' | '.join(map(escape_markdown, row))} |" for row in block.rows),
    ]


def _build_table(block: Block) -> RenderableType:
    from rich.table import Table

    left_out = len(block.rows) - TERMINAL_ROWS
    table = Table(
        title=_plain(block.title),
        title_justify="left",
        caption=f"{left_out:,} more in the stored report" if left_out > 0 else None,
        caption_justify="left",
    )
    for place, column in enumerate(block.columns):
        table.add_column(column, justify="left" if place < block.num_text_columns else "right")
    for row in block.rows[:TERMINAL_ROWS]:
        table.add_row(*map(_plain, row))
    return table


def _plain(text: str, style: str = "") -> Text:
    """Make text of what may come from rows: Rich would read square brackets in a string as markup."""
    from rich.text import Text

    return Text(protect(text), style=style)
