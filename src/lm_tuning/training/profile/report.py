"""Describe what a profile shows: as figures, and as a report of which the terminal shows one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from lm_tuning.reporting.document import Code, Item, Items, Paragraph, Report, Section, Table
from lm_tuning.reporting.text import keep_ends, write_number
from lm_tuning.runtime.device import describe_device
from lm_tuning.training.profile.profiling import TrainingProfile
from lm_tuning.training.profile.trace import Operation, TraceTable
from lm_tuning.training.records import OperationFigures, ProfileFigures
from lm_tuning.training.settings import TrainingSettings
from lm_tuning.wording import count_of

_NUM_OPERATIONS = 25
_NAME_CHARACTERS = 90


def run_facts(settings: TrainingSettings) -> dict[str, str]:
    """Return what the report says of the training that was profiled.

    Args:
        settings: of the training.
    """
    return {
        "model": settings.base["name_or_path"],
        "method": f"{settings.train.method}, {settings.weights_dtype} weights, {settings.compute_dtype} arithmetic",
        "device": describe_device().name,
    }


def profile_figures(profile: TrainingProfile) -> ProfileFigures:
    """Return the figures of a profile.

    Args:
        profile: see :func:`lm_tuning.training.profile.profiling.profile_training`.

    Returns:
        ``metrics`` with one number each for tracking, and ``operations``, one row each, the longest first.
    """
    table = profile.table
    groups = {
        f"{group.replace(' ', '_').replace('-', '_')}_fraction": seconds / table.seconds
        for group, seconds in table.seconds_by_group().items()
    }
    return {
        "metrics": {
            "profile": {
                "num_steps": table.num_steps,
                "step_seconds": table.seconds / max(table.num_steps, 1),
                "tokens_per_second_before": profile.tokens_per_second,
                "idle_fraction": table.idle_fraction,
                **groups,
            }
        },
        "measured_on": "gpu" if table.on_gpu else "cpu",
        "operations": [_figures_of(operation, table) for operation in table.operations],
    }


def _figures_of(operation: Operation, table: TraceTable) -> OperationFigures:
    return {
        "name": operation.name,
        "group": operation.group,
        # A trace counts nanoseconds; what stands behind them is noise of the division.
        "seconds": round(operation.seconds, 9),
        "fraction": operation.seconds / table.seconds,
        "count": operation.count,
    }


def tabulate_groups(table: TraceTable) -> Table:
    """Return where the time went: group of operations, share, milliseconds and operations per step.

    Args:
        table: of a profile. The time without any operation comes last.
    """
    counts: Counter[str] = Counter()
    for operation in table.operations:
        counts[operation.group] += operation.count
    steps = max(table.num_steps, 1)
    rows = [
        (group, f"{seconds / table.seconds:.1%}", _milliseconds(seconds, steps), write_number(counts[group] / steps, 0))
        for group, seconds in table.seconds_by_group().items()
    ]
    idle = table.idle_fraction
    what = "no kernel ran" if table.on_gpu else "outside of operations (Python)"
    rows.append((what, f"{idle:.1%}", _milliseconds(idle * table.seconds, steps), ""))
    return Table("", ("work", "share", "ms per step", "operations per step"), rows)


def compose_report(profile: TrainingProfile, facts: Mapping[str, str]) -> Report:
    """Lay out the whole report.

    Args:
        profile: see :func:`lm_tuning.training.profile.profiling.profile_training`.
        facts: what was profiled and where, a text by name.
    """
    table = profile.table
    steps = max(table.num_steps, 1)
    before = count_of(profile.num_warm_up_steps, "warm-up step")
    measured = (
        f"profiled: {count_of(table.num_steps, 'step')} of {1000 * table.seconds / steps:,.1f} ms, profiler included; "
        f"the {before} before ran at {write_number(profile.tokens_per_second, 0)} real tokens per second"
    )
    done_by = "The GPU's time, kernel by kernel" if table.on_gpu else "The processor's time, operation by operation"
    shares = f"{done_by}; shares are of the {table.seconds:,.2f} s of all profiled steps."
    if table.on_gpu:
        shares += " Kernels that run side by side make the shares add up to more than 100 %."
    longest = Table(
        "",
        ("operation", "work", "share", "ms per step", "times per step"),
        [
            (
                Code(keep_ends(operation.name, _NAME_CHARACTERS)),
                operation.group,
                f"{operation.seconds / table.seconds:.1%}",
                _milliseconds(operation.seconds, steps),
                write_number(operation.count / steps, 1),
            )
            for operation in table.operations[:_NUM_OPERATIONS]
        ],
        text_columns=(0, 1),
    )
    return Report(
        "Profile of a training",
        summary=[Items([*(Item(f"{name}: {value}") for name, value in facts.items()), Item(measured)])],
        sections=[
            Section("groups", "Where the time went", [Paragraph(shares), tabulate_groups(table)]),
            Section("operations", f"The {_NUM_OPERATIONS} longest operations", [longest]),
            Section("trace", "The trace", [_how_to_open(profile.trace.name)]),
        ],
    )


def _how_to_open(trace: str) -> Paragraph:
    return Paragraph(
        (
            Code(trace),
            " beside this file holds every operation with its time. Open ",
            Code("https://ui.perfetto.dev"),
            " and drop the file on it: it stays in the browser. The ranges ",
            *(Code("training step"), ", ", Code("forward"), ", ", Code("backward"), " and ", Code("optimizer")),
            " say where in a step you are.",
        )
    )


def _milliseconds(seconds: float, steps: int) -> str:
    return write_number(1000 * seconds / steps, 2)
