"""All scores of answers that the parameters ask for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from lm_tuning.errors import UserError
from lm_tuning.evaluation.scores.answered import Answered, Family
from lm_tuning.evaluation.scores.corpus import make_bleu, make_chrf
from lm_tuning.evaluation.scores.exact_match import ExactMatch
from lm_tuning.evaluation.scores.json_answers import JsonAnswers, read_schema
from lm_tuning.evaluation.scores.own import MetricFailed, OwnMetric, import_metric
from lm_tuning.evaluation.scores.rouge import TITLES, Rouge
from lm_tuning.evaluation.scores.rouge_tokenizers import MultilingualTokenizer, check_tokenizer, make_tokenizer
from lm_tuning.evaluation.statistics.scored_rows import ScoredRows
from lm_tuning.parameters.scores import ScoreParameters
from lm_tuning.wording import count_of, shorten

logger = logging.getLogger(__name__)

_JSON = ("json_valid", "json_schema")
_NUM_NAMED = 5


@dataclass(frozen=True)
class ScoredAnswers:
    """The scores of two models on the same rows.

    Attributes:
        scored: by name, base and tuned, in the order of the parameters.
        failed: why a score is missing, by its name.
    """

    scored: dict[str, tuple[ScoredRows, ScoredRows]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class Scorer:
    """What scores answers, made before a model is loaded."""

    def __init__(self, parameters: ScoreParameters) -> None:
        """Prepare every score.

        Args:
            parameters: ``evaluate.scores``.

        Raises:
            UserError: a package, a file or a function is missing; all of them together.
        """
        check_scores(parameters)
        self.names = [*parameters.names, *parameters.own_metrics]
        self.exact_match: ExactMatch | None = None
        if "exact_match" in self.names:
            self.exact_match = ExactMatch(parameters.normalizers, parameters.answer_pattern)
        self._pattern = parameters.answer_pattern
        self._own = [OwnMetric(name) for name in parameters.own_metrics]
        self._families: list[Family] = [*_make_families(parameters), *self._own]
        if self.exact_match is not None:
            self._families.append(self.exact_match)

    def check_references(
        self, rows: Answered, *, find_row: Callable[[int], str] = lambda row_id: f"row {row_id}"
    ) -> None:
        """Refuse references that cannot be compared with, and try the own metrics on them, before any answer is made.

        Args:
            rows: with references; the answers are not looked at.
            find_row: names the row of an id, with its file where that is known.

        Raises:
            UserError: a row has no reference, the pattern finds nothing in one, or an own metric fails.
        """
        problems = []
        needs_references = any(name not in _JSON for name in self.names)
        empty = [index for index, reference in enumerate(rows.references) if not reference.strip()]
        if needs_references and empty:
            problems.append(
                f"{_name_rows(rows, empty, find_row)} no reference: the answer is empty, so there is nothing to score "
                "against. Give them answers, leave them out of the data, or set evaluate.scores.names to scores that "
                f"need none ({', '.join(_JSON)})."
            )
        if self.exact_match is not None and self._pattern is not None:
            without = sorted(set(self.exact_match.rows_without(rows.references)) - set(empty))
            if without:
                shown = shorten(rows.references[without[0]], 120)
                problems.append(
                    f"{_name_rows(rows, without, find_row)} a reference in which evaluate.scores.answer_pattern = "
                    f"{self._pattern} finds nothing, such as {shown!r}: set a pattern "
                    "that finds the answer in every reference, or null to compare whole texts."
                )
        if rows.row_ids and not problems:
            problems += self._try_own(replace(rows, answers=rows.references))
        if problems:
            raise UserError(problems)

    def _try_own(self, rows: Answered) -> list[str]:
        problems: list[str] = []
        for metric in self._own:
            try:
                metric.try_on(rows)
            except UserError as error:
                problems += error.problems
        return problems

    def score(self, base: Answered, tuned: Answered) -> ScoredAnswers:
        """Score both models' answers.

        An own metric that fails on them takes its own score away and no other.

        Args:
            base: answers of the base model.
            tuned: of the tuned one, on the same rows.
        """
        found: dict[str, tuple[ScoredRows, ScoredRows]] = {}
        failed: dict[str, str] = {}
        for family in self._families:
            try:
                first, second = family.score(base), family.score(tuned)
            except MetricFailed as error:
                failed |= dict.fromkeys(family.names, str(error))
                continue
            found |= {name: (first[name], second[name]) for name in family.names}
        return ScoredAnswers({name: found[name] for name in self.names if name in found}, failed)


def _make_families(parameters: ScoreParameters) -> Iterator[Family]:
    """Yield the scores that libraries make."""
    names = parameters.names
    rouge = [name for name in names if name in TITLES]
    of_json = [name for name in names if name in _JSON]
    if rouge:
        yield Rouge(rouge, make_tokenizer(parameters.rouge_tokenizer))
    if "bleu" in names:
        yield make_bleu(parameters.bleu_tokenizer)
    if "chrf" in names:
        yield make_chrf(parameters.chrf_word_order)
    if of_json:
        yield JsonAnswers(of_json, parameters.json_schema_path)


def check_scores(parameters: ScoreParameters) -> None:
    """Refuse scores that cannot be made here, before anything else is done; loads none of the packages that make them.

    Args:
        parameters: ``evaluate.scores``.

    Raises:
        UserError: a package, a file or a function is missing; all of them together.
    """
    checks: list[Callable[[], object]] = []
    if any(name in TITLES for name in parameters.names):
        checks.append(lambda: check_tokenizer(parameters.rouge_tokenizer))
    if parameters.json_schema_path is not None:
        path = Path(parameters.json_schema_path)
        checks.append(lambda: read_schema(path))
    checks += [partial(import_metric, name) for name in parameters.own_metrics]
    problems: list[str] = []
    for check in checks:
        try:
            check()
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(problems)


def count_empty(answers: Sequence[str]) -> int:
    """Count the answers without a single word of any script.

    Args:
        answers: texts.
    """
    tokenizer = MultilingualTokenizer()
    return sum(not tokenizer.tokenize(answer) for answer in answers)


def _name_rows(rows: Answered, indices: Sequence[int], find_row: Callable[[int], str]) -> str:
    """Name some rows, the first few by where they stand."""
    named = ", ".join(find_row(rows.row_ids[index]) for index in indices[:_NUM_NAMED])
    more = f" and {len(indices) - _NUM_NAMED:,} more" if len(indices) > _NUM_NAMED else ""
    return f"{count_of(len(indices), 'held-out row')} ({named}{more}) {'has' if len(indices) == 1 else 'have'}"
