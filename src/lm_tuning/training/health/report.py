"""Facts and findings of a run and how it ended: the report that is stored as ``health.json``."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, cast

from lm_tuning.errors import Interrupted, MachineFault, UserError
from lm_tuning.findings import LOG_LEVELS, Severity
from lm_tuning.training.health.records import Fact, Facts, Finding, HealthRecord, StoredHealth

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)


# Receives the whole report whenever there is something new in it.
OnHealth = Callable[[HealthRecord], object]


def ignore_health(report: HealthRecord) -> None:
    """Drop a report."""


@dataclass
class RunState:
    """Which run a report is of, and how that run ended.

    Attributes:
        mlflow_run_id: its tracking run; ``None`` without tracking.
        state: ``running``, and at the end ``finished``, ``stopped`` (by a finding), ``interrupted`` (by a signal),
            ``out of memory``, ``refused`` (what was asked for cannot be done) or ``failed``. A process that is killed
            outright leaves ``running``.
        started: when the training began, as ISO 8601 in UTC; ``None`` before.
        ended: likewise when it ended; ``None`` until then.
        ended_by: the codes that stopped it, the signal or the kind of error; ``None`` for a finished run.
    """

    mlflow_run_id: str | None = None
    state: str = "running"
    started: str | None = None
    ended: str | None = None
    ended_by: str | None = None


@dataclass
class HealthReport:
    """Facts and findings about a run, stored as ``health.json``.

    Attributes:
        facts: named values stated before and after the first step.
        findings: what is not as expected.
        seconds: time that the checks took, in seconds.
        severities: what the user wants of a code: ``note``, ``warn``, ``stop``, or ``off`` to leave it out. It comes
            before the severity of the finding.
        run: which run this is, and how it ended.
        on_change: receives the report when the run begins, with each finding and when the run ends.
    """

    facts: Facts = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    severities: Mapping[str, str] = field(default_factory=dict)
    run: RunState = field(default_factory=RunState)
    on_change: OnHealth = ignore_health

    def begin(self) -> None:
        """Note that the training begins, so that the report of an earlier run never passes for this one's."""
        if self.run.started is None:
            self.run.started = _now()
            self.on_change(self.to_json())

    def go_on_from(self, record: StoredHealth | None, *, step: int, seconds: float) -> None:
        """Restore what a run found before a resume.

        Args:
            record: as a checkpoint keeps it; ``None`` of a version that kept none.
            step: of the checkpoint.
            seconds: that the checks took until then.
        """
        facts: Facts = {} if record is None else record["facts"]
        before = cast("float", facts.get("first_look_seconds", 0.0))
        # The checks before a resume come once too, however long the run then is.
        self.facts = {**facts, "resumed_from_step": step, "first_look_seconds": before + self.seconds}
        self.findings = [] if record is None else [Finding.from_json(finding) for finding in record["findings"]]
        self.seconds += seconds

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Note how the run ends, whatever ends it; a run that was refused before it began leaves no trace.

        Raises:
            BaseException: what the block raises.
        """
        try:
            yield
        except BaseException as error:
            self._end(*self._explain_end(error))
            raise
        self._end("finished", None)

    def tell(self) -> None:
        """Hand the report out as it is now; trouble with that must not end a training, or hide what ended it."""
        if self.run.started is None:
            return
        # The disk may be what is broken; the run's own end is the news.
        try:
            self.on_change(self.to_json())
        except Interrupted:
            raise
        except Exception as error:
            logger.warning("The health report could not be written: %s", error)

    def add(self, finding: Finding) -> None:
        """Log a finding and keep it, unless the user switched its code off."""
        wanted = self._as_configured(finding)
        if wanted is None:
            return
        self.findings.append(wanted)
        logger.log(LOG_LEVELS[wanted.severity], "Health %s", wanted.sentence())
        self.tell()

    def add_new(self, findings: Iterable[Finding]) -> None:
        """Add findings whose code was not said before: several checks, and several splits, may find the same."""
        for finding in findings:
            if not self.has(finding.code):
                self.add(finding)

    def has(self, code: str) -> bool:
        """Return whether a finding of this code is there."""
        return any(finding.code == code for finding in self.findings)

    def revise(self, finding: Finding) -> None:
        """Replace the finding of the same code by one with later counts; add it where there is none."""
        wanted = self._as_configured(finding)
        positions = [index for index, known in enumerate(self.findings) if known.code == finding.code]
        if positions and wanted is not None:
            self.findings[positions[-1]] = wanted
        else:
            self.add(finding)

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Count the time of a block as that of the checks."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began

    @property
    def pre_check_seconds(self) -> float:
        """Return the time of the checks up to the end of step 1; 0 before that."""
        return cast("float", self.facts.get("first_look_seconds", 0.0))

    def to_json(self) -> HealthRecord:
        """Return the report as JSON values; numbers that JSON does not know, such as NaN, become their names."""
        return {
            "run": asdict(self.run),
            "facts": {name: _name_not_finite(value) for name, value in self.facts.items()},
            "findings": [finding.to_json() for finding in self.findings],
            "seconds": round(self.seconds, 3),
        }

    def _explain_end(self, error: BaseException) -> tuple[str, str]:
        from lm_tuning.runtime.memory_errors import is_out_of_memory

        if isinstance(error, Interrupted):
            return "interrupted", error.signal_name
        if isinstance(error, KeyboardInterrupt):
            return "interrupted", "SIGINT"
        stops = sorted({finding.code for finding in self.findings if finding.severity == "stop"})
        if isinstance(error, UserError) and stops:
            return "stopped", ", ".join(stops)
        # A message for users wraps what happened, and that is what the report keeps.
        cause = error if error.__cause__ is None else error.__cause__
        kind = type(cause).__name__
        if is_out_of_memory(cause):
            return "out of memory", kind
        is_refused = isinstance(error, UserError) and not isinstance(error, MachineFault)
        return ("refused" if is_refused else "failed"), kind

    def _end(self, state: str, by: str | None) -> None:
        self.run.state, self.run.ended, self.run.ended_by = state, _now(), by
        self.tell()

    def _as_configured(self, finding: Finding) -> Finding | None:
        """Return the finding with the user's severity; ``None`` when it is off."""
        wanted = self.severities.get(finding.code)
        if finding.is_fatal:
            is_ignored = wanted not in {None, "stop"}
            why = f" train.health.severity cannot make it {wanted}: the run would crash." if is_ignored else ""
            return replace(finding, severity="stop", change=finding.change + why)
        if wanted is None:
            return finding
        return None if wanted == "off" else replace(finding, severity=cast("Severity", wanted))


@contextmanager
def telling_refusals(on_health: OnHealth, *, run_id: str | None, is_resume: bool) -> Iterator[None]:
    """Leave a report of a run that is refused before its training begins; a refused resume leaves the earlier one.

    Args:
        on_health: receives the report.
        run_id: the tracking run.
        is_resume: whether the run was to go on from a checkpoint.

    Raises:
        Exception: what the block raises.
    """
    try:
        yield
    except Exception as error:
        if not is_resume:
            report = HealthReport(run=RunState(mlflow_run_id=run_id, started=_now()), on_change=on_health)
            report._end(*report._explain_end(error))
        raise


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _name_not_finite(value: Fact) -> Fact:
    """Return a value of JSON with NaN and infinities as text."""
    if isinstance(value, Mapping):
        return {name: _name_not_finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_name_not_finite(inner) for inner in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def stop_if_needed(report: HealthReport) -> None:
    """End the run when a finding asks for it.

    Raises:
        UserError: listing every ``stop`` finding.
    """
    stops = [finding.sentence() for finding in report.findings if finding.severity == "stop"]
    if stops:
        raise UserError(["Training was stopped by its health check:", *stops])
