"""What ``preflight.json`` holds."""

from __future__ import annotations

from typing import TypedDict

from lm_tuning.data.split.records import SplitsSummary
from lm_tuning.parameters import ModelParameters, PreflightParameters, TokenizeParameters, TrainParameters
from lm_tuning.reporting.records import ReportSection
from lm_tuning.text.records import TokenSummary


class EarlierReports(TypedDict):
    """What the pipelines before preflight say of the rows."""

    token_summary: TokenSummary
    split_summary: SplitsSummary
    data_report: ReportSection


class PreflightParameterGroups(TypedDict):
    """The parameters that preflight goes by, under their names."""

    model: ModelParameters
    tokenize: TokenizeParameters
    train: TrainParameters
    preflight: PreflightParameters
    seed: int


class StoredIssue(TypedDict):
    """An issue; ``level`` is ``stop``, ``warning`` or ``note``, and ``section`` the key of a section of the report."""

    level: str
    section: str
    text: str
    advice: str
