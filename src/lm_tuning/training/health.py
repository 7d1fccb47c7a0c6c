"""What a run expects of its first step, what it measured, and the likely cause when they differ."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from lm_tuning.errors import UserError
from lm_tuning.text.decoding import decode
from lm_tuning.training.health_codes import CODES, Severity

if TYPE_CHECKING:
    import torch

    from lm_tuning.text.token_table import TokenRow

__all__ = [
    "DROPOUT_TOLERANCE",
    "ROUNDING_NATS",
    "Finding",
    "HealthReport",
    "Severity",
    "check_first_step",
    "check_layout",
    "has_dropout",
    "mark_supervised",
    "stop_if_needed",
]

logger = logging.getLogger(__name__)

ROUNDING_NATS = 0.01
"""Difference of two losses in 16 bits that says nothing, in nats per token; it matters where the loss is near 0."""

FUNCTIONAL_DROPOUT = ("attention_dropout", "attn_pdrop", "dropout", "activation_dropout", "hidden_dropout")
"""Names in a config for dropout that models apply without a module of its own."""

DROPOUT_TOLERANCE = 0.25
"""Allowed relative difference of the first loss when dropout draws random zeros in training."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is not as expected.

    Attributes:
        code: stable name, one of :data:`lm_tuning.training.health_codes.CODES`.
        measured: what was seen.
        expected: what was due.
        cause: the likely cause.
        change: the parameter to change, or what to do.
        severity: ``note``, ``warn`` or ``stop``; the code's own unless given.
    """

    code: str
    measured: str
    expected: str
    cause: str
    change: str
    severity: Severity | None = None

    def __post_init__(self) -> None:
        """Take the severity of the code where none is given."""
        if self.severity is None:
            object.__setattr__(self, "severity", CODES[self.code].severity)

    def sentence(self) -> str:
        """Say it in one line."""
        return f"[{self.code}] {self.measured}; expected {self.expected}. {self.cause} {self.change}".strip()


@dataclass
class HealthReport:
    """Facts and findings about a run, stored as ``health.json``.

    Attributes:
        facts: named values stated before and after the first step.
        findings: what is not as expected.
        seconds: time that the checks took, in seconds.
        severities: what the user wants of a code: ``note``, ``warn``, ``stop``, or ``off`` to leave it out. It comes
            before the severity of the finding.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    severities: Mapping[str, str] = field(default_factory=dict)

    def add(self, finding: Finding) -> None:
        """Log a finding and keep it, unless the user switched its code off."""
        wanted = self._as_configured(finding)
        if wanted is None:
            return
        self.findings.append(wanted)
        level = {"note": logging.INFO, "warn": logging.WARNING}.get(str(wanted.severity), logging.ERROR)
        logger.log(level, "Health %s", wanted.sentence())

    def has(self, code: str) -> bool:
        """Say whether a finding of this code is there."""
        return any(finding.code == code for finding in self.findings)

    def revise(self, finding: Finding) -> None:
        """Put a finding in the place of the one with its code, with later counts; add it where there is none."""
        wanted = self._as_configured(finding)
        places = [place for place, known in enumerate(self.findings) if known.code == finding.code]
        if places and wanted is not None:
            self.findings[places[-1]] = wanted
        else:
            self.add(finding)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "facts": self.facts,
            "findings": [asdict(finding) for finding in self.findings],
            "seconds": round(self.seconds, 3),
        }

    def _as_configured(self, finding: Finding) -> Finding | None:
        """Return the finding with the user's severity; ``None`` when it is off."""
        severity = self.severities.get(finding.code)
        if severity is None:
            return finding
        return None if severity == "off" else replace(finding, severity=cast("Severity", severity))


def has_dropout(model: torch.nn.Module) -> bool:
    """Say whether training draws random zeros, so that its loss differs from a plain forward pass."""
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
    """Say which count a ratio of losses equals, the nearest one; ``None`` when there is none."""
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
    """Decode a row with the supervised parts between ⟦ and ⟧; a long prompt is shortened in the middle."""
    parts, position = [], 0
    for start, end in row.spans:
        parts.append(decode(tokenizer, row.input_ids[position:start]))
        parts.append("⟦" + decode(tokenizer, row.input_ids[start:end]) + "⟧")
        position = end
    parts.append(decode(tokenizer, row.input_ids[position:]))
    text = "".join(parts)
    if len(text) > max_characters:
        half = max_characters // 2
        text = f"{text[:half]} … {text[-half:]}"
    return text
