"""Show a plan of micro-batches: a figure of speed and memory against their size, and the same as a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lm_tuning.reporting.document import Block, Cell, Paragraph, Table
from lm_tuning.reporting.markdown import write_blocks
from lm_tuning.training.planning.plan import BatchPlan
from lm_tuning.training.planning.records import ProbePoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NOT_COMPILED = (
    "Speeds are without the optimizer's step. Those without compiled layers were measured before the training; a "
    "training that compiles its layers goes on from the size that was planned so."
)
_GIB = 2**30
_MODES = {
    (False, False): ("C0", "no checkpointing"),
    (True, False): ("C1", "gradient checkpointing"),
    (False, True): ("C2", "compiled"),
    (True, True): ("C4", "compiled, gradient checkpointing"),
}
"""Colour and name by whether gradient checkpointing is on, and whether layers are compiled."""


def draw_plan(plan: BatchPlan) -> Figure:
    """Draw tokens per second and memory over the micro-batch size.

    What was only predicted, or ran out of memory, has a mark in the lower part alone.

    Args:
        plan: with a curve or without.
    """
    from matplotlib.figure import Figure

    if not plan.curve:
        figure = Figure(figsize=(8, 3 if plan.memory else 1.5))
        height = 0.85 if plan.memory else 0.5
        figure.text(0.5, height, f"Not measured: {plan.reason}.", ha="center", va="center", wrap=True, parse_math=False)
        if plan.memory:
            _draw_parts(figure.add_axes((0.05, 0.2, 0.9, 0.2)), plan)
        return figure
    # Figure rather than pyplot: no global state, no display, and nothing to close.
    figure = Figure(figsize=(8, 7.5 if plan.memory else 6), layout="constrained")
    if plan.memory:
        speed, memory, parts = figure.subplots(3, 1, height_ratios=[4, 4, 1])
        speed.sharex(memory)
        _draw_parts(parts, plan)
    else:
        speed, memory = figure.subplots(2, 1, sharex=True)
    total = plan.facts.get("total_bytes")
    for mode in _MODES:
        points = sorted(
            (point for point in plan.curve if _mode(point) == mode), key=lambda point: point.micro_batch_tokens
        )
        if points:
            _draw_mode(speed, memory, points, total=total)
    speed.axvline(plan.micro_batch_tokens, color="black", linestyle=":", linewidth=1, label="chosen")
    memory.axvline(plan.micro_batch_tokens, color="black", linestyle=":", linewidth=1)
    if total:
        limit = plan.facts["memory_fraction"] * total / _GIB
        memory.axhline(limit, color="C3", linestyle="--", linewidth=1, label=f"share, {limit:.1f} GiB")
        memory.axhline(total / _GIB, color="black", linewidth=1, label=f"all there is, {total / _GIB:.1f} GiB")
    sizes = sorted({plan.micro_batch_tokens, *(point.micro_batch_tokens for point in plan.curve)})
    # Sizes double as a rule, and the tick of each stands at the size itself, not at a power of two beside it.
    memory.set_xscale("log", base=2)
    memory.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45)
    memory.minorticks_off()
    memory.set_xlabel("positions of a micro-batch")
    memory.set_ylabel("memory (GiB)")
    speed.set_ylabel("tokens per second")
    for axes in (speed, memory):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    speed.set_title(plan.facts.get("device", ""), parse_math=False)
    return figure


def tabulate_plan(plan: BatchPlan) -> str:
    """Write the plan as Markdown: the choice, the curve, and what the speeds are of.

    Args:
        plan: with a curve or without.
    """
    return write_blocks(_blocks(plan))


def _blocks(plan: BatchPlan) -> Iterator[Block]:
    yield Paragraph(f"{plan.reason[:1].upper()}{plan.reason[1:]}.")
    if plan.curve:
        head = ("positions", "checkpointing", "compiled", "tokens/s", "peak, GiB", "with optimizer, GiB")
        total = plan.facts.get("total_bytes")
        rows = [_row(point, plan, total) for point in plan.curve]
        yield Table("", (*head, "of the memory", ""), rows, text_columns=(1, 2, 7))
        yield Paragraph(NOT_COMPILED)
    if plan.memory:
        yield Table(
            "",
            ("part of the memory", "GiB", ""),
            [
                *((row["part"], _gib(row["bytes"]), row["source"]) for row in plan.memory),
                ("all", _gib(sum(row["bytes"] for row in plan.memory)), ""),
            ],
            text_columns=(0, 2),
        )
    if plan.not_tried:
        yield Paragraph(f"Not tried for lack of time: {', '.join(f'{size:,}' for size in plan.not_tried)}.")
    if plan.warning:
        yield Paragraph(plan.warning)


def _draw_parts(axes: Axes, plan: BatchPlan) -> None:
    """Draw the parts of the memory as one bar."""
    start = 0.0
    for index, row in enumerate(plan.memory):
        size = row["bytes"] / _GIB
        label = f"{row['part']} {size:.2f}" + (" (estimated)" if row["source"] == "estimated" else "")
        axes.barh(0, size, left=start, color=f"C{index}", label=label)
        start += size
    axes.set_yticks([])
    axes.set_xlabel("memory of the chosen size by part (GiB)")
    axes.legend(fontsize="x-small", ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def _draw_mode(speed: Axes, memory: Axes, points: list[ProbePoint], *, total: int | None) -> None:
    color, label = _MODES[_mode(points[0])]
    measured = [point for point in points if point.outcome == "measured"]
    sizes = [point.micro_batch_tokens for point in measured]
    speed.plot(sizes, [point.tokens_per_second or 0.0 for point in measured], marker="o", color=color, label=label)
    taken = [(point.predicted_total_bytes or 0) / _GIB for point in measured]
    peaks = [(point.peak_memory_bytes or 0) / _GIB for point in measured]
    memory.plot(sizes, taken, marker="o", color=color, label=f"{label}, with optimizer")
    memory.plot(sizes, peaks, marker=".", color=color, linestyle=":", label=f"{label}, peak of the passes")
    refused = [point for point in points if point.outcome == "predicted"]
    memory.scatter(
        [point.micro_batch_tokens for point in refused],
        [(point.predicted_total_bytes or 0) / _GIB for point in refused],
        marker="o",
        facecolors="none",
        edgecolors=color,
        label=f"{label}, predicted" if refused else None,
    )
    failed = [point.micro_batch_tokens for point in points if point.outcome == "out of memory"]
    if failed:
        memory.scatter(
            failed, [(total or 0) / _GIB] * len(failed), marker="x", color=color, label=f"{label}, out of memory"
        )


def _row(point: ProbePoint, plan: BatchPlan, total: int | None) -> tuple[Cell, ...]:
    note: str = point.outcome if point.outcome != "measured" else ""
    # The very point, not one of its size: the same size may be there compiled and not compiled.
    if point is plan.choice:
        note = "chosen"
    if point.outcome == "measured" and not point.fits:
        note = f"{note}, over the share".removeprefix(", ")
    speed, taken = point.tokens_per_second, point.predicted_total_bytes
    return (
        point.micro_batch_tokens,
        *("yes" if is_on else "no" for is_on in _mode(point)),
        "-" if speed is None else f"{speed:,.0f}",
        _gib(point.peak_memory_bytes),
        _gib(taken),
        f"{taken / total:.0%}" if taken is not None and total else "-",
        note,
    )


def _mode(point: ProbePoint) -> tuple[bool, bool]:
    return point.gradient_checkpointing, point.compiled


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / _GIB:.2f}"
