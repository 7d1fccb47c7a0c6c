"""Draw scores with their intervals, and how losses and answers are spread over the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lm_tuning.evaluation.statistics.outcomes import ScoredPairs, write_interval
from lm_tuning.evaluation.statistics.records import ScoreRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_DRAWN = 12
"""Scores in one figure: the first ones."""

_COLORS = {"base": "0.45", "tuned": "C0"}
_LOSSES = ("nats_per_token", "nats_per_row")
_NUM_BINS = 30


def draw_scores(scores: Sequence[ScoreRecord], scored: ScoredPairs) -> Mapping[str, Figure]:
    """Draw what can be drawn of scores, by the name of the file.

    Args:
        scores: with their intervals.
        scored: the same scores by row.

    Returns:
        ``scores``, each with its interval, and ``loss_by_row``, a histogram; nothing where nothing was measured.
    """
    figures: dict[str, Figure] = {}
    known = [score for score in scores if score["tuned"]["low"] is not None][:MAX_DRAWN]
    if known:
        figures["scores"] = _draw_intervals(known)
    for name in _LOSSES:
        if name in scored and scored[name][1].num_rows > 1:
            base, tuned = scored[name]
            figures["loss_by_row"] = draw_histogram(
                {"base": base.row_values, "tuned": tuned.row_values}, title="Held-out loss by row", unit=tuned.unit
            )
    return figures


def _draw_intervals(scores: Sequence[ScoreRecord]) -> Figure:
    """Draw one panel for each score, since each has its own scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.9 + 0.85 * len(scores)), layout="constrained")
    panels = figure.subplots(len(scores), 1, squeeze=False)[:, 0]
    for axes, score in zip(panels, scores, strict=True):
        for height, model in ((1, "base"), (0, "tuned")):
            record = score["base"] if model == "base" else score["tuned"]
            value, low, high = record["value"], record["low"], record["high"]
            if value is None:
                continue
            if low is not None and high is not None:
                axes.plot([low, high], [height, height], color=_COLORS[model], linewidth=2.5, solid_capstyle="butt")
            axes.plot([value], [height], marker="o", color=_COLORS[model])
            axes.annotate(
                write_interval(record), (1.01, height), xycoords=("axes fraction", "data"), va="center", fontsize=8
            )
        axes.set_ylim(-0.7, 1.7)
        axes.set_yticks([1, 0], ["base", "tuned"], fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        axes.grid(axis="x", alpha=0.3)
        direction = "" if score["higher_is_better"] else ", lower is better"
        unit = f" ({score['unit']}{direction})" if score["unit"] else direction
        # A score of the project's own may be named anything; between two of these Matplotlib would read a formula.
        axes.set_title(f"{score['title']}{unit}".replace("$", r"\$"), fontsize=9, loc="left")
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    return figure


def draw_histogram(values: Mapping[str, np.typing.ArrayLike], *, title: str, unit: str) -> Figure:
    """Draw how values of both models are spread, in the same bins.

    Args:
        values: of ``base`` and ``tuned``, ``(rows,)``; what is no finite number is left out.
        title: what the values are.
        unit: of the values.
    """
    from matplotlib.figure import Figure

    finite = {name: np.asarray(each, dtype=np.float64) for name, each in values.items()}
    finite = {name: each[np.isfinite(each)] for name, each in finite.items()}
    everything = np.concatenate(list(finite.values()))
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    if len(everything):
        # A single value in the far tail would press all others into one bin; it is counted in the last one.
        last = float(np.quantile(everything, 0.995)) or 1.0
        edges = np.linspace(min(float(everything.min()), 0.0), last, _NUM_BINS + 1)
        for name, each in finite.items():
            axes.hist(np.minimum(each, last), bins=edges.tolist(), alpha=0.55, color=_COLORS[name], label=name)
            if len(each):
                axes.axvline(float(np.median(each)), color=_COLORS[name], linestyle="--", linewidth=1)
    axes.set_xlabel(f"{unit} (dashed: median; the last bar holds what lies beyond)")
    axes.set_ylabel("rows")
    axes.set_title(title, fontsize=10, loc="left")
    axes.legend()
    axes.grid(alpha=0.3)
    return figure
