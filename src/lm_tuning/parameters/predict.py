"""Parameters of predicting: which rows, and what is said of each."""

from __future__ import annotations

from lm_tuning.parameters.base import AutoOrCount, Count, ParameterGroup, Text
from lm_tuning.parameters.class_scores import Threshold
from lm_tuning.parameters.data import Rows


class PredictColumns(ParameterGroup):
    """Which column of the predicted rows plays which role."""

    text: Text | None = None
    """Column with the text; null reads it as training rows are read, by data.columns and data.template."""

    label: Text | None = None
    """Column with the class, to compare with; null takes the one of the training rows, where the file has it."""


class PredictParameters(ParameterGroup):
    """Which rows a tuned classifier names the class of, and what it says of each."""

    path: Rows | None = None
    """Where the rows are: file, folder, glob pattern, address or hub name, or a list of them; null names none, and the
    predict pipeline needs one."""

    columns: PredictColumns = PredictColumns()
    """Which column plays which role."""

    template: Text | None = None
    """Text made of columns named in braces; null reads the rows by data.columns and data.template."""

    max_rows: Count | None = None
    """Rows read of each file, from its beginning; null reads all."""

    all_scores: bool = False
    """Write the probability of every class beside the likeliest one's: a number for each class and row."""

    abstain_below: Threshold | None = None
    """Probability of the likeliest class below which a row gets no class; null goes by evaluate.abstain_below."""

    micro_batch_tokens: AutoOrCount = "auto"
    """Tokens of one forward pass, padding included; auto fits the memory."""
