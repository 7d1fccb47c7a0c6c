"""The report of an evaluation, as it is stored and as the terminal shows it."""

from __future__ import annotations

import io
from typing import Any, cast

from rich.console import Console

from lm_tuning.evaluation.records import TrainingFacts
from lm_tuning.evaluation.report import compose_report
from lm_tuning.reporting.markdown import write_markdown
from lm_tuning.reporting.terminal import build_summary

FACTS: TrainingFacts = {
    "tuned_folder": "here",
    "tokens_per_second": None,
    "samples_per_second": None,
    "steps_per_second": None,
}


def as_markdown(result: Any, **facts: Any) -> str:
    return write_markdown(compose_report(result, cast("TrainingFacts", {**FACTS, **facts})))


def on_terminal(result: Any, **facts: Any) -> str:
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    console.print(build_summary(compose_report(result, cast("TrainingFacts", {**FACTS, **facts}))))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]
