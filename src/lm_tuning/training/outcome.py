"""Describe in one paragraph what a training did and what it cost."""

from __future__ import annotations

from lm_tuning.training.records import TrainingSummary
from lm_tuning.wording import count_of, write_speed


def describe_result(summary: TrainingSummary) -> str:
    """Describe in one paragraph what the training did and what it cost.

    Args:
        summary: of a :class:`lm_tuning.training.results.TrainingResult`.
    """
    if not summary["num_steps"]:
        return "No step was made."
    unit = summary["unit"]
    early = ", ended early" if summary["stopped_early"] else ""
    phases = {
        "forward": summary["forward_fraction"],
        "backward": summary["backward_fraction"],
        "optimizer": summary["optimizer_fraction"],
    }
    shares = [f"loader wait {summary['loader_wait_fraction']:.2%}"]
    shares += [f"{phase} {share:.0%}" for phase, share in phases.items() if share is not None]
    return (
        f"Trained {count_of(summary['total_steps'], 'step')} ({summary['epochs']:.2f} epochs{early}): "
        f"loss {summary['first_loss']:.4f} -> {summary['last_loss']:.4f} nats/{unit}; "
        f"{summary['tokens_per_second']:,.0f} tokens/s{_describe_mfu(summary)}, "
        f"{write_speed(summary['samples_per_second'] or 0.0)} samples/s, "
        f"{write_speed(summary['steps_per_second'] or 0.0)} steps/s, "
        f"median step {summary['step_seconds_median']:.2f} s "
        f"(90 % within {summary['step_seconds_p90']:.2f} s, 99 % within {summary['step_seconds_p99']:.2f} s), "
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
