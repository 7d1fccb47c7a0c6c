"""Calibration, coverage and likely wrong labels, against scikit-learn and planted rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.calibration import calibration_curve

from lm_tuning.evaluation.calibration import NUM_BINS, abstain, calibrate, cover, find_mislabelled


def test_bins_are_those_of_scikit_learn() -> None:
    generator = np.random.default_rng(0)
    probabilities = generator.uniform(0.05, 1, 2000).astype(np.float32)
    is_right = generator.random(2000) < probabilities**2
    found = calibrate(probabilities, is_right)
    # Of 0 and 1 its bins take the same ends as ours, of floats between them there is no draw.
    accuracies, stated = calibration_curve(is_right, probabilities, n_bins=NUM_BINS)
    filled = [one for one in found.bins if one["num_rows"]]
    assert [one["accuracy"] for one in filled] == pytest.approx(accuracies.tolist())
    assert [one["mean_probability"] for one in filled] == pytest.approx(stated.tolist())
    weights = np.array([one["num_rows"] for one in filled]) / 2000
    assert found.error == pytest.approx(float((weights * np.abs(accuracies - stated)).sum()))
    assert found.error > 0.1
    assert found.mean_probability == pytest.approx(float(probabilities.mean()))


def test_a_model_that_says_how_sure_it_may_be_has_no_error() -> None:
    probabilities = np.array([0.5, 0.5, 1.0, 1.0], dtype=np.float32)
    assert calibrate(probabilities, np.array([True, False, True, True])).error == 0
    assert calibrate(probabilities, np.array([False, False, False, False])).error == pytest.approx(0.75)


def test_without_rows_or_with_nan_there_is_no_calibration() -> None:
    for probabilities in (np.zeros(0, np.float32), np.array([math.nan, 0.5], np.float32)):
        found = calibrate(probabilities, np.ones(len(probabilities), bool))
        assert found.bins == []
        assert math.isnan(found.error)


def test_a_threshold_leaves_rows_out_and_keeps_those_at_it() -> None:
    probabilities = np.array([0.2, 0.5, 0.8, 0.9], dtype=np.float32)
    is_right = np.array([False, False, True, True])
    assert cover(probabilities, is_right, [0.0, 0.5, 0.85, 0.95]) == [
        {"abstain_below": 0.0, "num_answered": 4, "answered_fraction": 1.0, "accuracy": 0.5},
        {"abstain_below": 0.5, "num_answered": 3, "answered_fraction": 0.75, "accuracy": pytest.approx(2 / 3)},
        {"abstain_below": 0.85, "num_answered": 1, "answered_fraction": 0.25, "accuracy": 1.0},
        {"abstain_below": 0.95, "num_answered": 0, "answered_fraction": 0.0, "accuracy": None},
    ]
    found = abstain(probabilities, is_right, 0.85)
    assert (found["wrong_rows_left_out_fraction"], found["right_rows_left_out_fraction"]) == (1.0, 0.5)
    assert abstain(probabilities, np.ones(4, bool), 0.3)["wrong_rows_left_out_fraction"] is None


def test_planted_wrong_labels_are_found_and_honest_mistakes_are_not() -> None:
    # Class 0 gets 0.9 for its rows, class 1 0.6. Row 10 says 0, and the model gives 1 as much as class 1 usually gets.
    # Row 11 says 1, and the model leans to 0 with less than class 0 usually gets.
    references = np.array([0] * 5 + [1] * 5 + [0, 1])
    predictions = np.array([0] * 5 + [1] * 5 + [1, 0])
    probabilities = np.array([0.95] * 5 + [0.6] * 5 + [0.7, 0.55], dtype=np.float32)
    own = np.array([0.95] * 5 + [0.6] * 5 + [0.3, 0.45])
    found = find_mislabelled(references, predictions, probabilities, -np.log(own).astype(np.float32))
    assert found.tolist() == [10]


def test_a_class_without_rows_accuses_nobody() -> None:
    found = find_mislabelled(
        np.array([0, 0]), np.array([0, 3]), np.array([0.9, 0.9], np.float32), np.array([0.1, 2.3], np.float32)
    )
    assert found.tolist() == []
    assert not len(find_mislabelled(*(np.zeros(0, np.int64),) * 2, *(np.zeros(0, np.float32),) * 2))
