"""Scores of a project's own: Python functions by their dotted names."""

from __future__ import annotations

import importlib
import logging
import math
import traceback
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, TypedDict

from lm_tuning.errors import UserError
from lm_tuning.evaluation.scores.answered import Answered
from lm_tuning.evaluation.statistics.scored_rows import ScoredRows, mean_of_rows

logger = logging.getLogger(__name__)

_KEY = "evaluate.scores.own_metrics"
_NUM_TRIED = 2
_INTERFACE = "It is called as score(references, answers, rows) and returns one finite number for each row."


class AnsweredRow(TypedDict):
    """What an own metric learns of a row beside its reference and its answer."""

    row_id: int
    prompt: str


Metric = Callable[[list[str], list[str], list[AnsweredRow]], Sequence[float]]
"""References, answers and rows to one number for each row."""


class MetricFailed(Exception):
    """Report that an own metric could not score a model's answers."""


class OwnMetric:
    """A function of the project as a score, the mean over rows of what it returns.

    Its attributes ``signature`` (a string), ``higher_is_better`` (a boolean, true without one) and ``title`` are taken
    where it has them.
    """

    def __init__(self, name: str) -> None:
        """Import the function.

        Args:
            name: its dotted name, which is the key of the score.

        Raises:
            UserError: it cannot be imported, or is none.
        """
        self.name = name
        self.names: Sequence[str] = (name,)
        self._function = import_metric(name)

    def score(self, rows: Answered) -> dict[str, ScoredRows]:
        """Return the score of one model.

        Args:
            rows: its answers.

        Raises:
            MetricFailed: the function raised, or returned something else than one finite number for each row.
        """
        function: Any = self._function
        return {
            self.name: mean_of_rows(
                self.name,
                self._call(rows),
                rows.ids,
                title=str(getattr(function, "title", self.name)),
                signature=f"own:{self.name}|{getattr(function, 'signature', 'signature:none')}",
                higher_is_better=bool(getattr(function, "higher_is_better", True)),
            )
        }

    def try_on(self, rows: Answered) -> None:
        """Call the function on a few references as if they were answers, before minutes go into the models.

        Args:
            rows: with references in the place of answers.

        Raises:
            UserError: it fails on them.
        """
        few = rows.head(_NUM_TRIED)
        try:
            self.score(few)
        except MetricFailed as error:
            raise UserError(
                f"{_KEY}: {error} It was tried on the first {len(few.row_ids)} references in the place of answers, "
                "and nothing was measured yet."
            ) from error

    def _call(self, rows: Answered) -> list[float]:
        given: list[AnsweredRow] = [
            {"row_id": int(row_id), "prompt": prompt} for row_id, prompt in zip(rows.row_ids, rows.prompts, strict=True)
        ]
        try:
            # Lists of its own, so that what it does to them changes no other score.
            values = list(self._function(list(rows.references), list(rows.answers), given))
        # Whatever the project's function raises, the other scores stand.
        except Exception as error:
            logger.debug("%s raised", self.name, exc_info=True)
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise MetricFailed(
                f"{self.name} raised {type(error).__name__}: {error} ({last.filename}, line {last.lineno})."
            ) from error
        if len(values) != len(rows.row_ids):
            raise MetricFailed(f"{self.name} returned {len(values)} values for {len(rows.row_ids)} rows. {_INTERFACE}")
        for index, value in enumerate(values):
            if not isinstance(value, (Real, bool)) or not math.isfinite(value):
                raise MetricFailed(
                    f"{self.name} returned {value!r} for row {rows.row_ids[index]}, the {index + 1}. of them. "
                    f"{_INTERFACE}"
                )
        return [float(value) for value in values]


def import_metric(name: str) -> Metric:
    """Import a function by its dotted name.

    Args:
        name: module and attribute, such as ``my_package.metrics.score``.

    Raises:
        UserError: the module cannot be imported, or has no such function.
    """
    module_name, _, attribute = name.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    # A module runs code when it is imported, which may raise anything.
    except Exception as error:
        raise UserError(
            f"{_KEY}: {name} cannot be imported: {type(error).__name__}: {error}. Modules are found in src/ of this "
            "project and among the installed packages."
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        what = "has nothing of that name" if function is None else f"has {type(function).__name__} under that name"
        raise UserError(f"{_KEY}: {name} is no function: {module_name} {what}. {_INTERFACE}")
    return function  # type: ignore[no-any-return]
