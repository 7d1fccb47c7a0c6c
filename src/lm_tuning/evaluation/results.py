"""Compare the tuned model with its base on the rows that were held out: as figures, as Markdown, for the terminal."""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from lm_tuning.errors import UserError
from lm_tuning.evaluation import class_scores, language
from lm_tuning.evaluation.base import Comparison, EvaluationJob
from lm_tuning.evaluation.classes import compare_with_majority
from lm_tuning.evaluation.language import compare_language_models
from lm_tuning.evaluation.records import EvaluationRecord
from lm_tuning.evaluation.settings import EvaluationSettings
from lm_tuning.models.tuned import read_tuning
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.reporting.text import (
    TERMINAL_CHARACTERS,
    TERMINAL_SAMPLES,
    Block,
    shorten,
)
from lm_tuning.runtime.log_records import protect
from lm_tuning.storage.folders import FolderStore, read_manifest
from lm_tuning.text.store.table import TokenTable, open_split
from lm_tuning.wording import code_span, escape_markdown, write_speed

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

__all__ = ["Comparison", "EvaluationSettings", "build_markdown", "build_summary", "describe_outcome", "evaluate_models"]

logger = logging.getLogger(__name__)


def evaluate_models(
    tuned_folder: Path,
    tokens_folder: Path,
    base_cache: FolderStore,
    settings: EvaluationSettings,
    *,
    on_progress: OnProgress = ignore_progress,
) -> Comparison:
    """Measure base and tuned model on the test split, or on the validation split when there is no test row.

    The base model's measurement is reused while the model, the rows and the settings that decide it stay. For an
    adapter the base is loaded once and gets the adapter afterwards; otherwise one model is loaded after the other. A
    classifier's base has no head for the classes, so the most frequent class of the training rows stands in for it.

    Args:
        tuned_folder: adapter or full weights with their ``tuning.json``.
        tokens_folder: a published folder of tokenized splits.
        base_cache: where measurements of base models are kept.
        settings: everything else that decides the figures.
        on_progress: told the rows done.

    Returns:
        The comparison; without held-out rows one that says so.

    Raises:
        UserError: the tuned model, its base or the tokens cannot be read, or the model was trained on other tokens.
    """
    tuning = read_tuning(tuned_folder)
    tokens_key = read_manifest(tokens_folder)["key"]
    _check_tokens(tuned_folder, tuning.get("tokens_key"), tokens_key)
    split, table = choose_split(tokens_folder)
    job = EvaluationJob(
        settings=settings,
        tuning=tuning,
        tuned_folder=tuned_folder,
        tokens_folder=tokens_folder,
        tokens_key=tokens_key,
        split=split,
        table=table,
        base_cache=base_cache,
        on_progress=on_progress,
    )
    is_classifier = tuning["task"] == "sequence_classification"
    compared = compare_with_majority(job) if is_classifier else compare_language_models(job)
    for warning in compared.result["warnings"]:
        logger.warning("%s", warning)
    return compared


def choose_split(tokens_folder: Path) -> tuple[str | None, TokenTable]:
    """Choose the split to evaluate: ``test`` if it has supervised rows, else ``validation``.

    Returns:
        The split's name, ``None`` when neither has any, and its table.
    """
    table = open_split(tokens_folder, "test")
    if table.num_supervised.any():
        return "test", table
    table = open_split(tokens_folder, "validation")
    return ("validation" if table.num_supervised.any() else None), table


def _check_tokens(tuned_folder: Path, trained_on: str | None, tokens_key: str) -> None:
    if trained_on != tokens_key:
        raise UserError(
            f"{tuned_folder} was trained on the token set {trained_on}, but the present one is {tokens_key}: rows that "
            "are held out now may have been trained on. Train on the present rows with "
            "`kedro run --pipelines=train,evaluate`, or set the parameters of data, split, tokenize and model back to "
            "those of that training and make its token set again with `kedro run --pipelines=split,tokenize,evaluate`."
        )


MLFLOW_COMMAND = "make mlflow"
TERMINAL_ROWS = 20
"""Rows of a table that the terminal shows; Markdown has all."""


def build_markdown(
    result: EvaluationRecord, *, tuned_folder: str, tokens_per_second: float | None, **speeds: float | None
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
    result: EvaluationRecord, *, tuned_folder: str, tokens_per_second: float | None, **speeds: float | None
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


def describe_outcome(result: EvaluationRecord) -> str:
    """Describe the outcome in one line for the log.

    Args:
        result: what ``evaluate_models`` gives as ``result``.
    """
    if result["skipped"]:
        return f"Evaluation skipped. {result['skipped']}"
    content = _content(result)
    changes = [f"{line.name} {line.base} -> {line.tuned} ({line.change})" for line in content.list_figures(result)]
    return f"{content.describe_rows(result)} {'; '.join(changes)}."


def _content(result: EvaluationRecord) -> ModuleType:
    return class_scores if result["task"] == "sequence_classification" else language


def _closing(result: EvaluationRecord, tuned_folder: str, **speeds: float | None) -> list[str]:
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
    for index, column in enumerate(block.columns):
        table.add_column(column, justify="left" if index < block.num_text_columns else "right")
    for row in block.rows[:TERMINAL_ROWS]:
        table.add_row(*map(_plain, row))
    return table


def _plain(text: str, style: str = "") -> Text:
    """Make text of what may come from rows: Rich would read square brackets in a string as markup."""
    from rich.text import Text

    return Text(protect(text), style=style)
