"""Scores of classes as sums over rows are those of scikit-learn, and a guess by frequency is what it says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn import metrics

from lm_tuning.batching.class_predictions import ClassLog
from lm_tuning.evaluation.class_rows import ClassRows, choose_top_k, guess_by_frequency, score_classes
from lm_tuning.evaluation.statistics.scored_rows import compare, interval

NUM_CLASSES = 9


def predicted(seed: int, num_rows: int = 400) -> tuple[np.ndarray, ClassRows, np.ndarray]:
    """Return references, what a made-up model says, and its probabilities."""
    generator = torch.Generator().manual_seed(seed)
    # The last class occurs nowhere, the one before among the predictions at most.
    references = torch.randint(0, NUM_CLASSES - 2, (num_rows,), generator=generator)
    logits = torch.randn(num_rows, NUM_CLASSES, generator=generator)
    logits[:, -1] = -50
    logits[torch.arange(num_rows), references] += 1.5
    log = ClassLog(num_rows, "cpu")
    for start in range(0, num_rows, 64):
        log.add(logits[start : start + 64], references[start : start + 64])
    made = log.in_order(np.arange(num_rows), list(range(num_rows)))
    return references.numpy(), ClassRows(made.classes, made.ranks, made.nats), torch.softmax(logits, -1).numpy()


@pytest.mark.parametrize("seed", range(5))
def test_scores_are_those_of_scikit_learn(seed: int) -> None:
    references, made, probabilities = predicted(seed)
    scores = score_classes(made, references, np.arange(400), num_classes=NUM_CLASSES, top_k=3)
    labels = np.arange(NUM_CLASSES)
    wanted = {
        "accuracy": metrics.accuracy_score(references, made.classes),
        "macro_f1": metrics.f1_score(references, made.classes, average="macro"),
        "micro_f1": metrics.f1_score(references, made.classes, average="micro"),
        "weighted_f1": metrics.f1_score(references, made.classes, average="weighted"),
        "top_k_accuracy": metrics.top_k_accuracy_score(references, probabilities, k=3, labels=labels),
        "nats_per_row": metrics.log_loss(references, probabilities, labels=labels),
    }
    assert {name: score.value for name, score in scores.items()} == pytest.approx(wanted, rel=1e-5)
    assert not scores["nats_per_row"].higher_is_better
    assert next(iter(scores)) == "accuracy", "what the verdict is about"


def test_scores_take_intervals_and_a_better_model_is_told() -> None:
    references, made, _ = predicted(1)
    class_rows = np.array([1, 9, *[1] * (NUM_CLASSES - 2)])
    guessed = guess_by_frequency(class_rows, references)
    base, tuned = (
        score_classes(one, references, np.arange(400), num_classes=NUM_CLASSES, top_k=None) for one in (guessed, made)
    )
    for name in ("accuracy", "macro_f1", "weighted_f1"):
        found = interval(tuned[name], seed=1)
        assert found.low < found.value < found.high
        assert compare(base[name], tuned[name], seed=1).p_value < 0.001


def test_a_guess_by_frequency_answers_the_largest_class_and_ranks_by_rows() -> None:
    guessed = guess_by_frequency(np.array([2, 5, 2, 0]), np.array([0, 1, 2, 3]))
    assert guessed.classes.tolist() == [1, 1, 1, 1]
    assert guessed.ranks.tolist() == [1, 0, 2, 3]
    assert guessed.nats.tolist() == pytest.approx([-math.log(2 / 9), -math.log(5 / 9), -math.log(2 / 9), math.inf])


def test_a_rank_is_no_hit_by_luck() -> None:
    log = ClassLog(3, "cpu")
    nan = math.nan
    log.add(torch.tensor([[1.0, 1.0, 1.0], [0.0, 2.0, 1.0], [nan, nan, nan]]), torch.tensor([2, 2, 1]))
    assert log.in_order(np.arange(3), [0, 1, 2]).ranks.tolist()[:2] == [2, 1]
    made = log.in_order(np.arange(3), [0, 1, 2])
    assert made.ranks[2] == 2 or made.classes[2] == 1


def test_the_k_follows_the_classes() -> None:
    assert choose_top_k("auto", 77) == 5
    assert choose_top_k("auto", 5) is None
    assert choose_top_k(2, 4) == 2
