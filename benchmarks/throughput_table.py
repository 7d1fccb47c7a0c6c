"""The tables and the chart of ``throughput.py``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_summary(found: list[dict[str, Any]], frameworks: Sequence[str]) -> str:
    """Return a table with a row per work: ours, each peer at its best, and ours over the fastest of them.

    Args:
        found: figures of all runs.
        frameworks: in the order of the columns.
    """
    peers = [name for name in frameworks if name != "ours" and any(entry["framework"] == name for entry in found)]
    heads = ["work", "ours, tokens/s", "GiB", "first loss"]
    for peer in peers:
        heads += [f"{peer}, tokens/s", "rows", "GiB", "first loss"]
    heads.append("ours over the best")
    lines = [f"| {' | '.join(heads)} |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for work in dict.fromkeys(entry["work"] for entry in found):
        of_work = {entry["framework"]: entry for entry in found if entry["work"] == work}
        ours = of_work.get("ours")
        cells = [work, *(_speed_cells(ours) if ours else [""] * 3)]
        for peer in peers:
            entry = of_work.get(peer)
            speed, memory, loss = _speed_cells(entry) if entry else [""] * 3
            cells += [speed, f"{entry['batch']}" if entry else "", memory, loss]
        best = max((of_work[peer]["tokens_per_second"] for peer in peers if peer in of_work), default=None)
        cells.append(f"{ours['tokens_per_second'] / best:.2f} x" if ours and best else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n" + "\n".join(lines) + "\n\n"


def _speed_cells(entry: dict[str, Any]) -> list[str]:
    """Return tokens per second, memory and first loss of a run."""
    return [f"{entry['tokens_per_second']:,.0f}", _memory(entry), f"{entry['losses'][0]:.4f}"]


def _memory(entry: dict[str, Any]) -> str:
    return "" if entry["memory_gb"] is None else f"{entry['memory_gb']:.1f}"


def write_table(found: list[dict[str, Any]]) -> str:
    """Return a table with a row per run.

    Args:
        found: figures of all runs.
    """
    ours = {entry["work"]: entry["tokens_per_second"] for entry in found if entry["framework"] == "ours"}
    heads = (
        "work", "framework", "a micro-batch", "tokens/s", "ours is", "padding", "memory GB", "TFLOP/s", "MFU", "losses",
        "tried",
    )  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for entry in found:
        ratio = ours.get(entry["work"], float("nan")) / entry["tokens_per_second"]
        mfu = "" if entry["mfu"] is None else f"{entry['mfu']:.1%}"
        size = f"{entry['budget']:,} tokens" if "budget" in entry else f"{entry['batch']} rows"
        losses = f"{entry['losses'][0]:.4f} -> {entry['losses'][-1]:.4f}"
        tried = ", ".join(_describe_size(size) for size in entry.get("tried", []))
        lines.append(
            f"| {entry['work']} | {entry['framework']} | {size} | {entry['tokens_per_second']:,.0f} | {ratio:.2f} x | "
            f"{entry['padding']:.1%} | {_memory(entry)} | {entry['tflops']:,.1f} | {mfu} | {losses} | {tried} |"
        )
    return "\n".join(lines) + "\n"


def _describe_size(size: dict[str, Any]) -> str:
    """Return what came of a batch of so many rows."""
    return f"{size['rows']}: {size['outcome'] if 'outcome' in size else format(size['tokens_per_second'], ',.0f')}"


def draw_chart(found: list[dict[str, Any]], path: Path, frameworks: Sequence[str]) -> None:
    """Draw tokens per second of every framework, a group of bars per work.

    Args:
        found: figures of all runs.
        path: of the PNG.
        frameworks: in the order of the bars.
    """
    from matplotlib.figure import Figure

    works = list(dict.fromkeys(entry["work"] for entry in found))
    shown = [name for name in frameworks if any(entry["framework"] == name for entry in found)]
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(len(shown), 1)
    for position, framework in enumerate(shown):
        speeds = [
            max((e["tokens_per_second"] for e in found if (e["work"], e["framework"]) == (work, framework)), default=0)
            for work in works
        ]
        bars = axes.bar([index + position * width for index in range(len(works))], speeds, width, label=framework)
        axes.bar_label(bars, labels=[f"{speed:,.0f}" if speed else "" for speed in speeds], fontsize="x-small")
    axes.set_xticks([index + (len(shown) - 1) * width / 2 for index in range(len(works))], works)
    axes.set_ylabel("real tokens per second")
    axes.set_title(", ".join(sorted({f"{entry['card']}, torch {entry['torch']}" for entry in found})), fontsize="small")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
