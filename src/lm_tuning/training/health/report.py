"""What a run expects of its first step, what it measured, and the likely cause when they differ."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

from lm_tuning.errors import Interrupted, MachineFault, UserError
from lm_tuning.findings import LOG_LEVELS, Severity
from lm_tuning.text.decoding import mark_supervised_text
from lm_tuning.training.health.records import Fact, Facts, Finding, HealthRecord, RunRecord, StoredHealth

if TYPE_CHECKING:
    import torch

    from lm_tuning.text.records import TokenRow

logger = logging.getLogger(__name__)

# Difference of two losses in 16 bits that says nothing, in nats per token; it matters where the loss is near 0.
ROUNDING_NATS = 0.01

# Names in a config for dropout that models apply without a module of its own.
FUNCTIONAL_DROPOUT = ("attention_dropout", "attn_pdrop", "dropout", "activation_dropout", "hidden_dropout")

# Allowed relative difference of the first loss when dropout draws random zeros in training.
DROPOUT_TOLERANCE = 0.25


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
            "run": cast("RunRecord", asdict(self.run)),
            "facts": {name: _name_not_finite(value) for name, value in self.facts.items()},
            "findings": [finding.to_json() for finding in self.findings],
            "seconds": round(self.seconds, 3),
        }

    def _explain_end(self, error: BaseException) -> tuple[str, str]:
        from lm_tuning.training.planning.out_of_memory import is_out_of_memory

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


def has_dropout(model: torch.nn.Module) -> bool:
    """Return whether training draws random zeros, so that its loss differs from a plain forward pass."""
    import torch

    modules = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())
    config = getattr(model, "config", None)
    return modules or any(_as_share(getattr(config, name, None)) > 0 for name in FUNCTIONAL_DROPOUT)


def _as_share(value: object) -> float:
    return value if isinstance(value, float) else 0.0


def check_layout(plain: float, through_batches: float, *, tolerance: float, batching: str) -> Finding | None:
    """Compare rows alone with the same rows in micro-batches; they must agree."""
    if math.isclose(plain, through_batches, rel_tol=tolerance, abs_tol=ROUNDING_NATS):
        return None
    packed = batching == "packed"
    return Finding(
        code="layout-changes-loss",
        measured=f"the first step's rows have {through_batches:.4f} nats per token in {batching} micro-batches",
        expected=f"{plain:.4f}, as measured row by row",
        cause="Packed rows see each other with this model or attention."
        if packed
        else "The model does not ignore padding on the right.",
        change="Set train.batching=padded." if packed else "Set model.attention=sdpa or eager.",
    )


def check_first_step(
    measured: float,
    logged: float,
    *,
    tolerance: float,
    num_micro_batches: int,
    num_ranks: int = 1,
    severity: Severity = "stop",
    unit: str = "token",
    fresh_head_classes: int | None = None,
) -> Finding | None:
    """Compare the logged loss of step 1 with the loss measured before it, and name the cause if they differ.

    Args:
        measured: nats per supervised token (per row for a classifier) by a plain forward pass.
        logged: what the first step reported.
        tolerance: allowed relative difference.
        num_micro_batches: micro-batches of the step.
        num_ranks: processes that train together.
        severity: of the finding.
        unit: what a loss is divided by, ``token`` or ``row``.
        fresh_head_classes: classes of a head that is new, whose loss must be near their logarithm; else ``None``.
    """
    if math.isfinite(logged) and abs(logged - measured) <= tolerance * measured + ROUNDING_NATS:
        return None
    ratio = logged / measured if measured else math.inf
    if not math.isfinite(logged):
        cause = "The loss is not a number: an overflow in the forward pass or in the loss."
        change = "Set train.precision=bfloat16 or float32."
    elif (explained := _explain_factor(ratio, num_micro_batches, num_ranks, max(tolerance, 0.02), unit)) is not None:
        cause = f"The loss is off by a factor of {ratio:.3g}, equal to {explained}"
        change = f"Whatever changed the loss or the training step must divide by the step's {unit} count."
    else:
        cause = "The cause is not one of the known ones."
        change = "Compare train.batching=padded and train.precision=float32."
    chance = (
        ""
        if fresh_head_classes is None
        else f", and log({fresh_head_classes}) = {math.log(fresh_head_classes):.2f} of a new head"
    )
    return Finding(
        code="first-loss-off",
        severity=severity,
        measured=f"step 1 logged {logged:.4f} nats per {unit} ({ratio:.3g} times the measured loss)",
        expected=f"{measured:.4f} ± {tolerance:.0%}, from a plain forward pass over the same rows{chance}",
        cause=cause,
        change=change,
    )


def _explain_factor(ratio: float, num_micro_batches: int, num_ranks: int, tolerance: float, unit: str) -> str | None:
    """Describe which count a ratio of losses equals, the nearest one; ``None`` when there is none."""
    if ratio <= 0:
        return None
    added = (
        f"a model or custom loss that returns a mean over its micro-batch must not be added up, as if it were divided "
        f"by the {unit}s of the whole step already."
    )
    factors: dict[float, str] = {
        num_micro_batches * num_ranks: f"the {num_micro_batches} micro-batches of a step times {num_ranks} ranks: "
        f"{added}",
        num_micro_batches: f"the {num_micro_batches} micro-batches of a step: {added}",
        num_ranks: f"the {num_ranks} ranks: the loss is multiplied by them, although gradients are averaged over them.",
        1 / max(num_micro_batches, 1): f"1 / {num_micro_batches} micro-batches: the loss is divided twice.",
    }
    factors.pop(1, None)
    # By ratio, not by difference: half and twice are equally far off.
    nearest = min(factors, key=lambda factor: abs(math.log(ratio / factor)), default=None)
    if nearest is None or not math.isclose(ratio, nearest, rel_tol=tolerance):
        return None
    return factors[nearest]


def stop_if_needed(report: HealthReport) -> None:
    """End the run when a finding asks for it.

    Raises:
        UserError: listing every ``stop`` finding.
    """
    stops = [finding.sentence() for finding in report.findings if finding.severity == "stop"]
    if stops:
        raise UserError(["Training was stopped by its health check:", *stops])


def mark_supervised(tokenizer: Any, row: TokenRow, *, max_characters: int = 2000) -> str:
    """Decode a row with the supervised parts between ⟦ and ⟧; a long text loses its middle."""
    text = mark_supervised_text(tokenizer, row)
    if len(text) > max_characters:
        half = max_characters // 2
        text = f"{text[:half]} … {text[-half:]}"
    return text
