"""Draw which classes a classifier takes for which, and how sure it is of its answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lm_tuning.batching.held_out_loss import IntArray
from lm_tuning.evaluation.calibration import Calibration
from lm_tuning.evaluation.class_records import CoveragePoint
from lm_tuning.reporting.text import keep_ends
from lm_tuning.wording import count_of, on_one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_DRAWN_CLASSES = 25
"""Classes whose names can be read side by side; of more, the ones that are confused most are drawn."""

_NAME_CHARACTERS = 36
# Fonts with letters that Matplotlib's own lacks, as Debian, Windows and macOS name them; those that are there are used.
_FONTS = (
    "Noto Sans CJK KR",
    "Noto Sans CJK JP",
    "NanumGothic",
    "Malgun Gothic",
    "AppleGothic",
    "Microsoft YaHei",
    "Noto Sans",
    "Arial Unicode MS",
)


def draw_confusions(references: IntArray, predictions: IntArray, names: Sequence[str]) -> Figure:
    """Draw in percent of each class's rows what they are taken for.

    Of up to 25 classes all are drawn, in the order of their ids. Of more, those of the most frequent confusions are,
    with those taken for each other side by side, and what goes to or comes from the others in a row and a column more.

    Args:
        references: class of each row, ``(rows,)``.
        predictions: predicted class of each row, ``(rows,)``.
        names: name of each class, in the order of their ids.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    shown, num_occurring = choose_drawn(references, predictions)
    shares, num_rows = share_out(references, predictions, shown)
    has_others = num_occurring > len(shown)
    labels = [*(write_name(names[index], index) for index in shown), *(["all others"] if has_others else [])]
    side = 3.2 + 0.36 * len(labels)
    figure = Figure(figsize=(side + 1.8, side), layout="compressed")
    axes = figure.subplots()
    if has_others:
        shares[-1, -1] = 0.0  # a row of another class that is taken for another class may be right or wrong
    # By the root: five rows of a hundred are a confusion to be seen.
    image = axes.imshow(shares * 100, cmap="Blues", norm=PowerNorm(0.5, vmin=0, vmax=100))
    for row, column in zip(*np.nonzero(shares.round(2)), strict=True):
        share = shares[row, column]
        color = "white" if share > 0.4 else "black"
        axes.text(column, row, f"{share * 100:.0f}", ha="center", va="center", fontsize=7, color=color)
    ticks = range(len(labels))
    with_rows = [f"{label} ({count:,})" for label, count in zip(labels, num_rows, strict=True)]
    fonts = _fonts()
    axes.set_xticks(ticks, labels, rotation=90, fontsize=8, fontfamily=fonts)
    axes.set_yticks(ticks, with_rows, fontsize=8, fontfamily=fonts)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("class of the row (rows)")
    axes.set_title(_title(len(shown), num_occurring), fontsize=10)
    bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02)
    bar.set_label("% of the class's rows")
    return figure


def choose_drawn(references: IntArray, predictions: IntArray) -> tuple[list[int], int]:
    """Choose the classes to draw.

    Args:
        references: class of each row, ``(rows,)``.
        predictions: predicted class of each row, ``(rows,)``.

    Returns:
        Their ids in the order of drawing, and how many classes occur.
    """
    occurring = np.union1d(references, predictions)
    if len(occurring) <= MAX_DRAWN_CLASSES:
        return occurring.tolist(), len(occurring)
    is_wrong = references != predictions
    pairs = Counter(
        (min(pair), max(pair))
        for pair in zip(references[is_wrong].tolist(), predictions[is_wrong].tolist(), strict=True)
    )
    # Pair by pair: a class comes beside the one that it is confused with, as far as one line allows.
    chosen: list[int] = []
    for pair, _ in sorted(pairs.items(), key=lambda item: (-item[1], item[0])):
        new = [index for index in pair if index not in chosen]
        if len(chosen) + len(new) > MAX_DRAWN_CLASSES:
            break
        known = [chosen.index(index) for index in pair if index in chosen]
        where = known[0] + 1 if known else len(chosen)
        chosen[where:where] = new
    if not chosen:  # nothing is confused: the largest classes, then
        counts = np.bincount(references)
        chosen = np.argsort(-counts, kind="stable")[:MAX_DRAWN_CLASSES].tolist()
    return chosen, len(occurring)


def share_out(
    references: IntArray, predictions: IntArray, shown: Sequence[int]
) -> tuple[npt.NDArray[np.float64], list[int]]:
    """Count what the rows of each drawn class are taken for, as shares of these rows.

    Args:
        references: class of each row, ``(rows,)``.
        predictions: predicted class of each row, ``(rows,)``.
        shown: ids of the drawn classes.

    Returns:
        ``(drawn, drawn)`` with one more row and column for all other classes where there are any, and the rows of each
        line.
    """
    num_classes = int(max(references.max(), predictions.max())) + 1
    # The line in which each class is drawn; all others share the last one.
    line_of = np.full(num_classes, len(shown))
    line_of[list(shown)] = np.arange(len(shown))
    size = len(shown) + 1
    counts = np.bincount(line_of[references] * size + line_of[predictions], minlength=size * size).reshape(size, size)
    if not counts[-1].any() and not counts[:, -1].any():
        counts = counts[:-1, :-1]
    num_rows = counts.sum(axis=1)
    return counts / np.maximum(num_rows, 1)[:, None], num_rows.tolist()


def draw_calibration(calibration: Calibration, coverage: Sequence[CoveragePoint]) -> Figure:
    """Draw how often the model is right by how sure it is, how sure it is, and what refusing to answer would gain.

    Args:
        calibration: its bins.
        coverage: accuracy and share of the answered rows by threshold.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 1))
    _draw_bins(figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[1, 0]), calibration)
    _draw_coverage(figure.add_subplot(grid[:, 1]), coverage)
    return figure


def _draw_bins(above: Axes, below: Axes, calibration: Calibration) -> None:
    bins = [one for one in calibration.bins if one["num_rows"]]
    width = calibration.bins[0]["high"] - calibration.bins[0]["low"]
    starts = [one["low"] for one in bins]
    more: Any = {"width": width, "align": "edge", "edgecolor": "white"}
    accuracies = [one["accuracy"] or 0.0 for one in bins]
    stated = [one["mean_probability"] or 0.0 for one in bins]
    above.bar(starts, accuracies, color="C0", label="right, of the rows in the bin", **more)
    above.plot(stated, accuracies, "o", color="C0", markersize=3)
    above.plot([0, 1], [0, 1], "--", color="gray", label="as sure as it is right")
    above.set_xlim(0, 1)
    above.set_ylim(0, 1)
    above.set_ylabel("accuracy")
    above.set_title(
        f"Calibration error {calibration.error:.3f} ({len(calibration.bins)} bins), "
        f"mean probability {calibration.mean_probability:.3f}",
        fontsize=10,
    )
    above.legend(loc="upper left", fontsize=8)
    below.bar(starts, [one["num_rows"] for one in bins], color="gray", **more)
    below.set_xlim(0, 1)
    below.set_ylabel("rows")
    below.set_xlabel("probability of the predicted class")


def _draw_coverage(axes: Axes, coverage: Sequence[CoveragePoint]) -> None:
    points = [(point, point["accuracy"]) for point in coverage if point["accuracy"] is not None]
    shares, accuracies = [point["answered_fraction"] for point, _ in points], [accuracy for _, accuracy in points]
    axes.plot(shares, accuracies, "o-", color="C1", markersize=4)
    named: list[float] = []
    for (point, accuracy), share in zip(points, shares, strict=True):
        # Thresholds that leave nearly the same rows lie on one another: the lowest of them is named.
        if not named or abs(share - named[-1]) > 0.03:
            where: Any = {"textcoords": "offset points", "xytext": (0, 7), "ha": "center", "fontsize": 8}
            axes.annotate(f"{point['abstain_below']:g}", (share, accuracy), **where)
            named.append(share)
    axes.set_xlim(1.02, min([0.95, *shares]) - 0.02)
    axes.set_xlabel("share of the rows that are answered")
    axes.set_ylabel("accuracy of these")
    axes.set_title("No answer below a probability (the numbers)", fontsize=10)
    axes.grid(alpha=0.3)


def write_name(name: str, class_id: int) -> str:
    """Write the name of a class for a plot; one with letters that no font here has is called by its id.

    Args:
        name: as in the rows, of any length.
        class_id: its id.
    """
    short = keep_ends(on_one_line(name), _NAME_CHARACTERS).replace("$", r"\$")
    return short if _can_draw(short) else f"class {class_id}"


def _fonts() -> list[str]:
    from matplotlib import font_manager

    there = set(font_manager.get_font_names())
    return ["DejaVu Sans", *(font for font in _FONTS if font in there)]


def _can_draw(text: str) -> bool:
    if text.isascii():
        return True
    from matplotlib import font_manager

    fonts = [font_manager.get_font(font_manager.findfont(font)) for font in _fonts()]
    return all(any(font.get_char_index(ord(letter)) for font in fonts) for letter in text)


def _title(num_shown: int, num_occurring: int) -> str:
    if num_shown == num_occurring:
        return f"What each class is taken for ({count_of(num_shown, 'class')})"
    return f"What classes are taken for: the {num_shown} that are confused most, of {num_occurring:,}"
