"""Describe what a profile shows: as figures, as Markdown, and in lines for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lm_tuning.reporting.text import number, shorten
from lm_tuning.runtime.device import describe_device
from lm_tuning.training.profile.profiling import TrainingProfile
from lm_tuning.training.profile.trace import TraceTable
from lm_tuning.training.settings import TrainingSettings
from lm_tuning.wording import count_of, escape_markdown

if TYPE_CHECKING:
    from rich.console import RenderableType

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


def profile_figures(profile: TrainingProfile) -> dict[str, Any]:
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
        "operations": [
            {
                "name": operation.name,
                "group": operation.group,
                "seconds": round(operation.seconds, 9),
                "fraction": operation.seconds / table.seconds,
                "count": operation.count,
            }
            for operation in table.operations
        ],
    }


def group_rows(table: TraceTable) -> list[tuple[str, str, str, str]]:
    """Return group, share of the time, milliseconds and operations per step; the time without any comes last.

    Args:
        table: of a profile.
    """
    counts: dict[str, int] = {}
    for operation in table.operations:
        counts[operation.group] = counts.get(operation.group, 0) + operation.count
    steps = max(table.num_steps, 1)
    rows = [
        (group, f"{seconds / table.seconds:.1%}", number(1000 * seconds / steps, 2), number(counts[group] / steps, 0))
        for group, seconds in table.seconds_by_group().items()
    ]
    idle = table.idle_fraction
    what = "no kernel ran" if table.on_gpu else "outside of operations (Python)"
    return [*rows, (what, f"{idle:.1%}", number(1000 * idle * table.seconds / steps, 2), "")]


def build_summary(table: TraceTable) -> RenderableType:
    """Build what the terminal shows: where the time went.

    Args:
        table: of a profile.
    """
    from rich.table import Table
    from rich.text import Text

    shown = Table(title=None)
    for name in ("work", "share", "ms per step", "operations per step"):
        shown.add_column(name, justify="left" if name == "work" else "right")
    for row in group_rows(table):
        shown.add_row(*map(Text, row))
    return shown


def write_profile(profile: TrainingProfile, facts: dict[str, str]) -> str:
    """Write a profile as Markdown.

    Args:
        profile: see :func:`lm_tuning.training.profile.profiling.profile_training`.
        facts: what was profiled and where, a text by name.
    """
    table = profile.table
    steps = max(table.num_steps, 1)
    done_by = "The GPU's time, kernel by kernel" if table.on_gpu else "The processor's time, operation by operation"
    lines = [
        "# Profile of a training",
        "",
        *(f"- {escape_markdown(name)}: {escape_markdown(value)}" for name, value in facts.items()),
        f"- profiled: {count_of(table.num_steps, 'step')} of {1000 * table.seconds / steps:,.1f} ms, profiler "
        f"included; the steps before ran at {number(profile.tokens_per_second, 0)} real tokens per second",
        "",
        "## Where the time went",
        "",
        f"{done_by}; shares are of the {table.seconds:,.2f} s of all profiled steps."
        + (" Kernels that run side by side make the shares add up to more than 100 %." if table.on_gpu else ""),
        "",
        "| work | share | ms per step | operations per step |",
        "|---|---:|---:|---:|",
        *(f"| {' | '.join(map(escape_markdown, row))} |" for row in group_rows(table)),
        "",
        f"## The {_NUM_OPERATIONS} longest operations",
        "",
        "| operation | work | share | ms per step | times per step |",
        "|---|---|---:|---:|---:|",
        *(
            f"| {_as_code(operation.name)} | {operation.group} "
            f"| {operation.seconds / table.seconds:.1%} | {number(1000 * operation.seconds / steps, 2)} "
            f"| {number(operation.count / steps, 1)} |"
            for operation in table.operations[:_NUM_OPERATIONS]
        ),
        "",
        "## The trace",
        "",
        f"`{profile.trace.name}` beside this file holds every operation with its time. Open <https://ui.perfetto.dev> "
        "and drop the file on it: it stays in the browser. The ranges `training step`, `forward`, `backward` and "
        "`optimizer` say where in a step you are.",
        "",
    ]
    return "\n".join(lines)


def _as_code(name: str) -> str:
    """Set a name as it is into a cell: names of kernels are full of signs that Markdown would read."""
    return f"`{shorten(name, _NAME_CHARACTERS).replace('`', '').replace('|', '/')}`"
