"""Plots of a classifier show the classes that matter, whatever their number and names."""

from __future__ import annotations

import io
import warnings

import numpy as np
import pytest

from lm_tuning.evaluation.calibration import calibrate, cover
from lm_tuning.evaluation.class_plots import (
    MAX_DRAWN_CLASSES,
    choose_drawn,
    draw_calibration,
    draw_confusions,
    share_out,
    write_name,
)


def test_few_classes_are_all_drawn() -> None:
    references, predictions = np.array([0, 0, 2, 5]), np.array([0, 2, 2, 2])
    shown, num_occurring = choose_drawn(references, predictions)
    assert (shown, num_occurring) == ([0, 2, 5], 3)
    shares, num_rows = share_out(references, predictions, shown)
    assert shares.tolist() == [[0.5, 0.5, 0], [0, 1, 0], [0, 1, 0]]
    assert num_rows == [2, 1, 1]


def test_of_many_classes_the_planted_confusions_are_drawn_side_by_side() -> None:
    references = np.repeat(np.arange(280), 10)
    predictions = references.copy()
    predictions[(references == 200) & (np.arange(2800) % 10 < 7)] = 17
    predictions[(references == 30) & (np.arange(2800) % 10 < 3)] = 200
    shown, num_occurring = choose_drawn(references, predictions)
    assert num_occurring == 280
    assert len(shown) <= MAX_DRAWN_CLASSES
    assert abs(shown.index(200) - shown.index(17)) == 1
    shares, num_rows = share_out(references, predictions, shown)
    assert shares[shown.index(200), shown.index(17)] == pytest.approx(0.7)
    assert shares[shown.index(30), shown.index(200)] == pytest.approx(0.3)
    assert num_rows[-1] == 2800 - 10 * len(shown), "the others share a line"
    assert shares.sum(axis=1) == pytest.approx(np.ones(len(shown) + 1))


def test_many_classes_without_a_confusion_are_drawn_too() -> None:
    references = np.arange(100)
    shown, _ = choose_drawn(references, references)
    assert len(shown) == MAX_DRAWN_CLASSES


@pytest.mark.parametrize("num_classes", [2, 25, 77])
def test_figures_are_drawn_without_a_warning_with_any_names(num_classes: int) -> None:
    generator = np.random.default_rng(1)
    references = generator.integers(0, num_classes, 500)
    predictions = np.where(generator.random(500) < 0.8, references, (references + 1) % num_classes)
    names = [("$x$ 카드 \n분실 ሀ", "a_very_long_name_" * 9, "plain")[index % 3] for index in range(num_classes)]  # noqa: RUF001
    probabilities = generator.uniform(0.3, 1, 500).astype(np.float32)
    is_right = references == predictions
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for figure in (
            draw_confusions(references, predictions, names),
            draw_calibration(calibrate(probabilities, is_right), cover(probabilities, is_right)),
        ):
            figure.savefig(io.BytesIO(), format="png", dpi=40)


def test_names_with_letters_that_no_font_has_become_numbers() -> None:
    assert write_name("card\nlost", 4) == "card ↵ lost"
    assert write_name("\U00013000\U00013001", 4) == "class 4"
