"""Compare the tuned model with its base on the rows that were held out: as figures, as Markdown, for the terminal."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lm_tuning.errors import UserError
from lm_tuning.evaluation import class_scores, classes, language
from lm_tuning.evaluation.base import Compared
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.reporting.text import (
    TERMINAL_CHARACTERS,
    TERMINAL_SAMPLES,
    Block,
    shorten,
)
from lm_tuning.runtime.log_records import protect
from lm_tuning.storage.folders import FolderStore, StagedFolder, read_manifest
from lm_tuning.text.store.table import TokenTable, open_split
from lm_tuning.wording import code_span, escape_markdown, write_speed

if TYPE_CHECKING:
    from pandas import DataFrame
    from rich.console import RenderableType
    from rich.text import Text


logger = logging.getLogger(__name__)

SKIPPED = "Neither test nor validation has rows to evaluate on: set split.test or split.validation."


@dataclass(frozen=True)
class Comparison:
    """What :func:`evaluate_models` returns.

    Attributes:
        result: figures of both models, a few samples and warnings; what ``json.dumps`` takes.
        answers: one row for each answered prompt; of a classifier the rows that it got wrong, and some right ones.
        columns: names of the answers' values, in their order.
        base_evaluation: the measurement of the base model, stored already or staged for it.
    """

    result: dict[str, Any]
    answers: list[dict[str, Any]]
    columns: tuple[str, ...]
    base_evaluation: StagedFolder | Path

    def table(self) -> DataFrame:
        """Return the answers as a frame rather than a list, so that their file has its header even without rows."""
        from pandas import DataFrame

        return DataFrame(self.answers, columns=list(self.columns))


def evaluate_models(
    tuned_folder: Path,
    tokens_folder: Path,
    base_cache: FolderStore,
    *,
    seed: int,
    device: str,
    weights_dtype: str,
    compute_dtype: str,
    tf32: bool = True,
    attention: str = "auto",
    memory_bytes: int | None = None,
    max_loss_rows: int | None = None,
    num_generate_rows: int = 64,
    max_new_tokens: int = 32,
    num_beams: int = 1,
    micro_batch_tokens: int | None = None,
    generate_batch_rows: int = 16,
    num_samples: int = 5,
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
        seed: decides which rows are taken.
        device: ``cpu``, ``cuda`` or ``mps``.
        weights_dtype: type that both models are loaded in.
        compute_dtype: type of the matrix products.
        tf32: whether float32 matrices are multiplied in TF32, which the measured loss depends on.
        attention: attention implementation, or ``auto``.
        memory_bytes: memory of the device; ``None`` when unknown.
        max_loss_rows: rows whose loss or class is measured; ``None`` means all.
        num_generate_rows: rows answered; 0 leaves generation out. A classifier answers none.
        max_new_tokens: longest answer.
        num_beams: number of beams; 1 answers greedily.
        micro_batch_tokens: most positions of a forward pass; ``None`` chooses by memory.
        generate_batch_rows: prompts answered at once.
        num_samples: rows that the result shows.
        on_progress: told the rows done.

    Returns:
        The comparison; without held-out rows one that says so.

    Raises:
        UserError: the tuned model, its base or the tokens cannot be read, or the model was trained on other tokens.
    """
    from lm_tuning.models.tuned import read_tuning

    tuning = read_tuning(tuned_folder)
    tokens_key = read_manifest(tokens_folder)["key"]
    _check_tokens(tuned_folder, tuning.get("tokens_key"), tokens_key)
    split, table = choose_split(tokens_folder)
    loading = {"dtype": weights_dtype, "attention": attention, "device": device}
    measuring: dict[str, Any] = {
        "micro_batch_tokens": micro_batch_tokens,
        "device": device,
        "memory_bytes": memory_bytes,
        "weights_dtype": weights_dtype,
        "compute_dtype": compute_dtype,
        "on_progress": on_progress,
    }
    choosing: dict[str, Any] = {"seed": seed, "max_loss_rows": max_loss_rows, "num_samples": num_samples}
    compared: Compared
    if tuning["task"] == "sequence_classification":
        compared = classes.compare_with_majority(
            tuning,
            tuned_folder,
            open_split(tokens_folder, "train"),
            table if split else None,
            base_cache,
            **choosing,
            loading=loading,
            measuring=measuring,
        )
    else:
        compared = language.compare_language_models(
            tuning,
            tuned_folder,
            table if split else None,
            base_cache,
            **choosing,
            rows_from=[tokens_key, split],
            precision=[device, weights_dtype, compute_dtype, tf32 and device == "cuda", attention],
            num_generate_rows=num_generate_rows,
            loading=loading,
            measuring=measuring,
            generating={
                "max_new_tokens": max_new_tokens,
                "num_beams": num_beams,
                "generate_batch_rows": generate_batch_rows,
            },
        )
    result = {
        "split": split,
        "task": tuning["task"],
        **compared.result,
        "tuned_method": tuning["method"],
        "tokens_key": tokens_key,
        "warnings": compared.warnings,
        "skipped": None if split else SKIPPED,
    }
    for warning in compared.warnings:
        logger.warning("%s", warning)
    return Comparison(result, compared.answers, compared.columns, compared.base_evaluation)


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
    """Describe the outcome in one line for the log.

    Args:
        result: what ``evaluate_models`` gives as ``result``.
    """
    if result["skipped"]:
        return f"Evaluation skipped. {result['skipped']}"
    content = _content(result)
    changes = [f"{line.name} {line.base} -> {line.tuned} ({line.change})" for line in content.list_figures(result)]
    return f"{content.describe_rows(result)} {'; '.join(changes)}."


def _content(result: dict[str, Any]) -> ModuleType:
    return class_scores if result["task"] == "sequence_classification" else language


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
    for index, column in enumerate(block.columns):
        table.add_column(column, justify="left" if index < block.num_text_columns else "right")
    for row in block.rows[:TERMINAL_ROWS]:
        table.add_row(*map(_plain, row))
    return table


def _plain(text: str, style: str = "") -> Text:
    """Make text of what may come from rows: Rich would read square brackets in a string as markup."""
    from rich.text import Text

    return Text(protect(text), style=style)
