"""Parameters of the rows: where they are read, what the columns mean, how they are split."""

from __future__ import annotations

from typing import Literal

from lm_tuning.parameters.base import CountOrZero, Fraction, ParameterGroup, PathText, Text


class ColumnParameters(ParameterGroup):
    """Which column plays which role; null goes by the usual names, such as the role's own."""

    text: Text | None = None
    """Column with running text."""

    prompt: Text | None = None
    """Column with what the model is asked."""

    response: Text | None = None
    """Column with what the model should answer."""

    system: Text | None = None
    """Column with the system message of a row."""

    messages: Text | None = None
    """Column with a list of turns, each with role and content."""

    label: Text | None = None
    """Column with the class name."""


class DataParameters(ParameterGroup):
    """Which rows are read, and what becomes of rows that do not fit."""

    path: PathText = "data/01_raw/example/functions.jsonl"
    """JSONL, JSON, CSV or Parquet file; the example is made on first use."""

    validation_path: PathText | None = None
    """File with the validation rows; null takes them from path, as many as split.validation says."""

    test_path: PathText | None = None
    """File with the test rows; null takes them from path, as many as split.test says."""

    format: Literal["auto", "text", "prompt_response", "messages", "text_label"] = "auto"
    """What one row is; auto reads it off the columns."""

    columns: ColumnParameters = ColumnParameters()
    """Which column plays which role."""

    template: Text | None = None
    """Prompt or text made of columns named in braces, such as "Summarize:\\n{dialogue}"; null for a column as it is."""

    on_bad_row: Literal["error", "skip"] = "error"
    """What a row of a wrong type does: error names the rows and stops, skip leaves them out and counts them."""

    normalize: Literal["nfc", "none"] = "nfc"
    """Unicode form of all text: nfc makes composed and decomposed letters equal, none keeps the bytes of the file."""


class SplitParameters(ParameterGroup):
    """How rows are divided into train, validation and test."""

    validation: CountOrZero | Fraction = 0.05
    """Validation rows: a fraction of all rows, or a number of rows; 0 for none."""

    test: CountOrZero | Fraction = 0.05
    """Test rows: a fraction of all rows, or a number of rows; 0 for none."""

    group: Text | None = None
    """Column whose equal values stay in one split, such as an author or a document; null lets rows move freely."""

    stratify: Text | None = None
    """Column whose values keep their shares in every split; null draws without regard to any."""

    duplicates: Literal["keep_together", "drop", "ignore"] = "keep_together"
    """Rows with the same text: keep_together puts all copies in one split, drop keeps the first, ignore looks away."""
