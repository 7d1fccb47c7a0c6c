"""What a run expects of its first step, what it measured, and the likely cause when they differ."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch.nn.functional import cross_entropy

from lm_tuning.errors import UserError
from lm_tuning.text.token_table import TokenRow, labels_of
from lm_tuning.training.batches import StepBatch
from lm_tuning.training.losses import sum_nats

logger = logging.getLogger(__name__)

ROUNDING_NATS = 0.01
"""Difference of two losses in 16 bits that says nothing, in nats per token; it matters where the loss is near 0."""

Severity = Literal["note", "warn", "stop"]
DROPOUT_TOLERANCE = 0.25
"""Allowed relative difference of the first loss when dropout draws random zeros in training."""


@dataclass(frozen=True)
class Finding:
    """One thing that is not as expected.

    Attributes:
        code: stable name, for searching.
        severity: ``note``, ``warn`` or ``stop``.
        measured: what was seen.
        expected: what was due.
        cause: the likely cause.
        change: the parameter to change, or what to do.
    """

    code: str
    severity: Severity
    measured: str
    expected: str
    cause: str
    change: str

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
    """

    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, finding: Finding) -> None:
        """Log a finding and keep it."""
        self.findings.append(finding)
        level = {"note": logging.INFO, "warn": logging.WARNING, "stop": logging.ERROR}[finding.severity]
        logger.log(level, "Health %s", finding.sentence())

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "facts": self.facts,
            "findings": [asdict(finding) for finding in self.findings],
            "seconds": round(self.seconds, 3),
        }


def measure_plain_loss(model: Any, rows: Sequence[TokenRow], *, device: torch.device | str) -> float:
    """Measure the loss of rows one by one with an ordinary forward pass.

    Nothing of the training path is used: no micro-batch, no packing, no selected positions, no gradient. So it
    tells what the first step's loss must be.

    Args:
        model: a causal language model; its mode is put back afterwards.
        rows: tokenized rows.
        device: where the model is.

    Returns:
        Nats per supervised token, all rows together.
    """
    was_training = model.training
    model.eval()
    nats, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            ids = torch.from_numpy(row.input_ids.astype("int64"))[None].to(device)
            labels = torch.from_numpy(labels_of(row))[1:].to(device)
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            nats += float(cross_entropy(logits, labels, reduction="sum"))
            count += row.num_supervised
    model.train(was_training)
    return nats / count


def measure_training_path(model: Any, batch: StepBatch, *, device: torch.device | str, select_logits: bool) -> float:
    """Measure the loss of the same rows through the micro-batches that training uses, without gradient.

    Returns:
        Nats per supervised token of the step.
    """
    was_training = model.training
    model.eval()
    with torch.no_grad():
        nats = sum(
            float(sum_nats(model, micro.to(device), select_logits=select_logits)) for micro in batch.micro_batches
        )
    model.train(was_training)
    return nats / batch.num_supervised


def has_dropout(model: torch.nn.Module) -> bool:
    """Say whether training draws random zeros, so that its loss differs from a plain forward pass."""
    modules = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())
    config = getattr(model, "config", None)
    return modules or any((getattr(config, name, 0.0) or 0.0) > 0 for name in ("attention_dropout", "attn_pdrop"))


def check_layout(plain: float, through_batches: float, *, tolerance: float, batching: str) -> Finding | None:
    """Compare rows alone with the same rows in micro-batches; they must agree."""
    if math.isclose(plain, through_batches, rel_tol=tolerance, abs_tol=ROUNDING_NATS):
        return None
    packed = batching == "packed"
    return Finding(
        code="layout-changes-loss",
        severity="stop",
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
) -> Finding | None:
    """Compare the logged loss of step 1 with the loss measured before it, and name the cause if they differ.

    Args:
        measured: nats per supervised token by a plain forward pass.
        logged: what the first step reported.
        tolerance: allowed relative difference.
        num_micro_batches: micro-batches of the step.
        num_ranks: processes that train together.
        severity: of the finding.
    """
    if math.isfinite(logged) and abs(logged - measured) <= tolerance * measured + ROUNDING_NATS:
        return None
    ratio = logged / measured if measured else math.inf
    cause, change = (
        "The cause is not one of the known ones.",
        "Compare train.batching=padded and train.precision=float32.",
    )
    factors: dict[float, str] = {
        num_micro_batches * num_ranks: f"the {num_micro_batches} micro-batches of a step times {num_ranks} ranks",
        num_micro_batches: f"the {num_micro_batches} micro-batches of a step: each one's mean is added up, "
        "where their sums should be divided once by the step's token count",
        num_ranks: f"the {num_ranks} ranks",
        1 / max(num_micro_batches, 1): f"1 / {num_micro_batches} micro-batches: the loss is divided twice",
    }
    if not math.isfinite(logged):
        cause = "The loss is not a number: an overflow in the forward pass or in the loss."
        change = "Set train.precision=bfloat16 or float32."
    else:
        for factor, meaning in factors.items():
            if factor != 1 and math.isclose(ratio, factor, rel_tol=max(tolerance, 0.02)):
                cause = f"The loss is off by a factor of {ratio:.3g}, equal to {meaning}."
                change = "Whatever changed the loss or the training step must divide by the step's token count."
                break
    return Finding(
        code="first-loss-off",
        severity=severity,
        measured=f"step 1 logged {logged:.4f} nats per token ({ratio:.3g} times the measured loss)",
        expected=f"{measured:.4f} ± {tolerance:.0%}, from a plain forward pass over the same rows",
        cause=cause,
        change=change,
    )


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
        parts.append(tokenizer.decode(row.input_ids[position:start]))
        parts.append("⟦" + tokenizer.decode(row.input_ids[start:end]) + "⟧")
        position = end
    parts.append(tokenizer.decode(row.input_ids[position:]))
    text = "".join(parts)
    if len(text) > max_characters:
        half = max_characters // 2
        text = f"{text[:half]} … {text[-half:]}"
    return text
