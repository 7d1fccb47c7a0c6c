"""What a training or its profile writes down: the numbers of steps, the figures of the whole run, and these as prose.

Loads nothing heavy, so that whoever only declares these types pays for none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NotRequired, TypeAlias, TypedDict

from lm_tuning.runtime.nvml import CardFigures
from lm_tuning.wording import count_of, write_speed

if TYPE_CHECKING:
    from lm_tuning.batching.step_plan import TrainedSource

StepRow: TypeAlias = dict[str, float]
"""What a step learned: ``step``, ``epoch``, ``gradient_norm``, ``learning_rate``, and loss and supervised count under
names that end in their unit, token or row."""

EvaluationRow: TypeAlias = dict[str, float]
"""One evaluation while training: ``step`` (0 is the base model), ``epoch``, ``seconds``, and each held-out figure by
the name that it has elsewhere, with ``validation_`` before it."""

TrainingRow: TypeAlias = dict[str, float | None]
"""A row of ``training_summary.csv``: that of a step, and the held-out figures, ``None`` where they were not
measured."""


class EfficiencyRow(CardFigures):
    """What a step cost, a row of ``efficiency_summary.csv``; a phase that nobody marked is ``None``."""

    step: int
    seconds: float
    tokens_per_second: float
    samples_per_second: float
    steps_per_second: float
    num_tokens: int
    num_rows: int
    num_micro_batches: int
    padding_fraction: float
    loader_wait_seconds: float
    forward_seconds: NotRequired[float | None]  # a checkpoint of the first versions has no phases
    backward_seconds: NotRequired[float | None]  # none for a replayed step, whose forward pass holds it
    optimizer_seconds: NotRequired[float | None]
    peak_memory_bytes: int


class StoredStepLog(TypedDict):
    """The numbers of all steps as a checkpoint holds them; the first versions did not count our own time."""

    steps: list[StepRow]
    efficiency: list[EfficiencyRow]
    evaluations: list[EvaluationRow]
    own_seconds: NotRequired[float]


class SpeedFigures(CardFigures):
    """How fast the steps of a run were and where their time went; ``None`` for what could not be had.

    Attributes:
        step_seconds_p10: a tenth of the steps were faster.
        padding_fraction: share of all positions that held no token.
        peak_memory_bytes: the most held by the GPU's tensors, or by the process on a CPU.
        number_format: dtype of the measured matrix product.
        known_peak_flops: operations per second that the device's maker states.
        measured_matmul_flops: operations per second of a matrix product before the training.
        mfu: model FLOPs utilization, the share of the former.
        mfu_of_measured: the share of the latter.
    """

    tokens_per_second: float | None
    samples_per_second: float | None
    steps_per_second: float | None
    step_seconds_p10: float | None
    step_seconds_median: float | None
    step_seconds_p90: float | None
    step_seconds_p99: float | None
    padding_fraction: float | None
    loader_wait_fraction: float | None
    forward_fraction: float | None
    backward_fraction: float | None
    optimizer_fraction: float | None
    peak_memory_bytes: int | None
    model_flops_per_token: float | None
    model_flops_per_second: float | None
    device_name: str | None
    number_format: str | None
    known_peak_flops: float | None
    measured_matmul_flops: float | None
    mfu: float | None
    mfu_of_measured: float | None


class EfficiencyFigures(SpeedFigures):
    """All that a run says of its cost, as ``efficiency.json`` has it.

    Attributes:
        logging_fraction: share of the training's time that writing numbers down took.
        health_fraction: share that health checks took after step 1; a longer run has no more of those before it.
        training_seconds: of the loop, with those before a resume, as all of the following.
        health_seconds: of all health checks.
        first_look_seconds: of those up to the end of step 1.
        total_seconds: of the whole training, loading and checks included.
    """

    logging_fraction: float | None
    health_fraction: float | None
    training_seconds: float
    health_seconds: float
    first_look_seconds: float
    total_seconds: float


class TrainingSummary(EfficiencyFigures):
    """The figures of a whole run.

    Attributes:
        method: ``full``, ``lora`` or ``qlora``.
        num_steps: steps that have numbers.
        total_steps: the last step; before the plan's last one if the training stopped early.
        epochs: passes over the rows.
        stopped_early: whether it did.
        unit: what losses are divided by.
        first_loss: logged by the first step; ``None`` without steps.
        last_loss: likewise.
        trainable_parameters: how many numbers were trained.
        best_step: step of the best held-out figure; ``None`` without one.
        sources: what each source gave.
    """

    method: str
    num_steps: int
    total_steps: int
    epochs: float
    stopped_early: bool
    unit: str
    first_loss: float | None
    last_loss: float | None
    trainable_parameters: int
    best_step: int | None
    sources: list[TrainedSource]


class OperationFigures(TypedDict):
    """One operation in ``profile.json``: its time in seconds, its share of all, and how often it ran."""

    name: str
    group: str
    seconds: float
    fraction: float
    count: int


class ProfileFigures(TypedDict):
    """What is stored as ``profile.json``; ``metrics`` go to tracking."""

    metrics: dict[str, dict[str, float | None]]
    measured_on: Literal["gpu", "cpu"]
    operations: list[OperationFigures]


# Backward passes take longer than forward ones; below this share of their time most steps were replayed.
_REPLAYED = 0.5


def describe_result(summary: TrainingSummary) -> str:
    """Describe in one paragraph what the training did and what it cost.

    Args:
        summary: of a :class:`lm_tuning.training.results.TrainingResult`.
    """
    if not summary["num_steps"]:
        return "No step was made."
    unit = summary["unit"]
    early = ", ended early" if summary["stopped_early"] else ""
    forward, backward = summary["forward_fraction"], summary["backward_fraction"]
    phases = {"forward": forward, "backward": backward, "optimizer": summary["optimizer_fraction"]}
    # No backward pass is that short: most steps were replayed, with both passes at one launch.
    if forward is not None and backward is not None and backward < _REPLAYED * forward:
        phases = {"forward and backward": forward + backward, "optimizer": summary["optimizer_fraction"]}
    shares = [f"loader wait {summary['loader_wait_fraction']:.2%}"]
    shares += [f"{phase} {share:.0%}" for phase, share in phases.items() if share is not None]
    return (
        f"Trained {count_of(summary['total_steps'], 'step')} ({summary['epochs']:.2f} epochs{early}): "
        f"loss {summary['first_loss']:.4f} -> {summary['last_loss']:.4f} nats/{unit}; "
        f"{summary['tokens_per_second']:,.0f} tokens/s{_describe_mfu(summary)}, "
        f"{write_speed(summary['samples_per_second'] or 0.0)} samples/s, "
        f"{write_speed(summary['steps_per_second'] or 0.0)} steps/s, "
        f"median step {summary['step_seconds_median']:.3g} s "
        f"(90 % within {summary['step_seconds_p90']:.3g} s, 99 % within {summary['step_seconds_p99']:.3g} s), "
        f"padding {summary['padding_fraction']:.1%}; of the step time {', '.join(shares)}"
        f"{_describe_own_share(summary)}; peak memory {(summary['peak_memory_bytes'] or 0) / 2**30:.1f} GiB"
        f"{_describe_card(summary)}."
    )


def _describe_card(summary: TrainingSummary) -> str:
    """Describe what the driver told of the graphics card; nothing without one."""
    parts = []
    if (busy := summary.get("gpu_utilization_fraction")) is not None:
        parts.append(f"{busy:.0%} busy")
    if (watts := summary.get("gpu_power_watts")) is not None:
        parts.append(f"{watts:,.0f} W")
    if (used := summary.get("gpu_memory_used_bytes")) is not None:
        parts.append(f"at most {used / 2**30:.1f} of {summary['gpu_memory_total_bytes'] / 2**30:.1f} GiB in use")
    return f"; the GPU by its driver: {', '.join(parts)}" if parts else ""


def _describe_own_share(summary: TrainingSummary) -> str:
    """Describe what checking and reporting took; nothing where no step of this training is timed."""
    if summary["health_fraction"] is None:
        return ""
    return (
        f"; of the training time health checks {summary['health_fraction']:.2%}, logging "
        f"{summary['logging_fraction']:.3%}; checks up to step 1 {summary['first_look_seconds']:.1f} s"
    )


def _describe_mfu(summary: TrainingSummary) -> str:
    """Compare the speed with that of the device, as far as it is known."""
    parts = []
    if summary["mfu"] is not None and summary["known_peak_flops"] is not None:
        peak = _write_rate(summary["known_peak_flops"])
        parts.append(f"{summary['mfu']:.1%} of the {peak} that {summary['device_name']} has at most")
    if summary["mfu_of_measured"] is not None and summary["measured_matmul_flops"] is not None:
        measured = _write_rate(summary["measured_matmul_flops"])
        parts.append(f"{summary['mfu_of_measured']:.1%} of the {measured} of a {summary['number_format']} product")
    return f" ({', '.join(parts)})" if parts else ""


def _write_rate(flops: float) -> str:
    """Write operations per second in the unit that suits them."""
    return f"{flops / 1e12:,.0f} TFLOP/s" if flops >= 1e13 else f"{flops / 1e9:,.0f} GFLOP/s"
