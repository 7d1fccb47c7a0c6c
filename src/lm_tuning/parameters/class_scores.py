"""Value types of the parameters on a classifier's scores."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from lm_tuning.parameters.base import AutoOrCount, read_scientific

TopK = AutoOrCount
"""The k of top-k accuracy."""

Threshold = Annotated[float, Field(gt=0, lt=1), BeforeValidator(read_scientific)]
"""A probability below which no answer is given. At 0 all rows would be answered, at 1 none."""
