"""Intervals and tests say what SciPy's say where both define the same thing, and own up to too few rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import sparse, stats

from lm_tuning.evaluation.class_rows import ClassRows, score_classes
from lm_tuning.evaluation.statistics import resampling
from lm_tuning.evaluation.statistics.scored_rows import ScoredRows, compare, interval, mean_of_rows, ratio


def drawn(seed: int, num_rows: int = 80) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    generator = np.random.default_rng(seed)
    base = generator.beta(2, 5, num_rows)
    return base, np.clip(base + generator.normal(0.04, 0.1, num_rows), 0, 1)


def score(values: Any, **more: Any) -> ScoredRows:
    return mean_of_rows("score", values, np.arange(len(values)), **more)


def test_the_interval_of_a_mean_is_that_of_scipy() -> None:
    values, _ = drawn(0)
    found = interval(score(values), seed=1)
    theirs = stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(2)
    ).confidence_interval
    assert found.value == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=0.004)
    assert found.num_rows == 80


def test_the_interval_of_a_ratio_is_that_of_scipy() -> None:
    generator = np.random.default_rng(3)
    tokens = generator.integers(1, 50, 120)
    nats = tokens * generator.gamma(2, 1, 120)
    scored = ScoredRows("nats_per_token", np.stack([nats, tokens], 1).astype(float), ratio, row_ids=np.arange(120))
    found = interval(scored, seed=1)
    theirs = stats.bootstrap(
        (nats, tokens),
        lambda nats, tokens, axis: nats.sum(axis) / tokens.sum(axis),
        paired=True,
        n_resamples=20_000,
        method="percentile",
        rng=np.random.default_rng(2),
    ).confidence_interval
    assert found.value == pytest.approx(nats.sum() / tokens.sum())
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=0.05)


def test_the_test_of_a_difference_is_that_of_scipy() -> None:
    for seed in (3, 4, 5):
        base, tuned = drawn(seed, 40)
        found = compare(score(base), score(tuned), seed=1)
        theirs = stats.permutation_test(
            (tuned, base),
            lambda first, second, axis: (first - second).mean(axis),
            permutation_type="samples",
            n_resamples=50_000,
            rng=np.random.default_rng(2),
        )
        assert found.value == pytest.approx(tuned.mean() - base.mean())
        assert found.p_value == pytest.approx(theirs.pvalue, abs=0.01)
        # The interval is narrower than one that forgets that the rows are the same ones.
        unpaired = [interval(score(values), seed=1) for values in (base, tuned)]
        assert found.high - found.low < 0.7 * sum(each.high - each.low for each in unpaired)


def test_few_rows_are_tried_in_every_way() -> None:
    base, tuned = drawn(3, 11)
    found = compare(score(base), score(tuned), seed=1)
    theirs = stats.permutation_test(
        (tuned, base), lambda first, second, axis: (first - second).mean(axis), permutation_type="samples"
    )
    assert found.p_value == pytest.approx(theirs.pvalue, abs=1e-12), "all 2^11 swaps, nothing drawn"


def test_p_is_never_zero() -> None:
    found = compare(score(np.linspace(0, 0.1, 60)), score(np.linspace(0.9, 1, 60)), seed=1)
    assert found.p_value == 1 / (resampling.NUM_SWAPS + 1)
    assert found.is_significant


def test_equal_models_differ_by_nothing() -> None:
    values, _ = drawn(0)
    found = compare(score(values), score(values), seed=1)
    assert (found.value, found.low, found.high, found.p_value) == (0, 0, 0, 1)
    assert not found.is_significant


def test_chance_is_called_a_difference_in_about_one_of_twenty() -> None:
    generator = np.random.default_rng(0)
    called = 0
    for seed in range(300):
        shared = generator.normal(size=40)
        base, tuned = (shared + generator.normal(size=40) for _ in range(2))
        called += compare(score(base), score(tuned), seed).p_value < 0.05
    assert 5 <= called <= 27


def test_shares_near_the_edge_have_an_interval() -> None:
    none, all_right = (interval(score(np.full(50, value), unit="0 to 1"), seed=1) for value in (0.0, 1.0))
    theirs = stats.binomtest(0, 50).proportion_ci(method="wilson")
    assert (none.low, none.high) == pytest.approx((theirs.low, theirs.high), abs=1e-9)
    assert all_right.low == pytest.approx(1 - theirs.high)
    assert (none.value, all_right.value, all_right.high) == (0, 1, 1)
    wrong = score(np.zeros(50), unit="0 to 1")
    same = compare(wrong, wrong, seed=1)
    assert same.low < -0.02 < 0.02 < same.high, "50 wrong rows of both do not show that the models are equal"


def test_a_score_without_bounds_is_never_taken_for_a_share() -> None:
    assert interval(score(np.zeros(50)), seed=1).high == 0
    assert not score([0.0, 1.0]).is_binary


def test_too_few_rows_have_neither_interval_nor_test() -> None:
    base, tuned = drawn(0, 9)
    assert math.isnan(interval(score(base), seed=1).low)
    found = compare(score(base), score(tuned), seed=1)
    assert found.value == pytest.approx(tuned.mean() - base.mean())
    assert math.isnan(found.low)
    assert math.isnan(found.p_value)
    assert not found.is_significant
    assert math.isnan(interval(score([]), seed=1).value)


def test_a_loss_that_is_no_number_has_no_interval() -> None:
    base, tuned = drawn(0)
    tuned[3] = math.nan
    assert math.isnan(interval(score(tuned), seed=1).high)
    assert math.isnan(compare(score(base), score(tuned), seed=1).p_value)


def test_the_draws_are_those_of_the_seed_however_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    base, tuned = (score(values) for values in drawn(0))
    first = (interval(base, seed=1), compare(base, tuned, seed=1))
    monkeypatch.setattr(resampling, "_MAX_CELLS", 1000)
    assert (interval(base, seed=1), compare(base, tuned, seed=1)) == first
    assert interval(base, seed=2) != first[0]


def test_memory_is_bounded_and_many_rows_are_drawn_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resampling, "_MAX_CELLS", 4000)
    monkeypatch.setattr(resampling, "MAX_DRAWS_TIMES_ROWS", 1_200_000)
    values = np.random.default_rng(0).random((1000, 2))
    shapes = [sums.shape for (sums,) in resampling.bootstrap_sums([values], 0)]
    assert set(shapes) == {(4, 2)}
    assert sum(shape[0] for shape in shapes) == 1200


@pytest.mark.parametrize("is_sparse", [False, True])
def test_sums_of_many_rows_are_drawn_at_once_as_row_by_row(monkeypatch: pytest.MonkeyPatch, is_sparse: bool) -> None:
    generator = np.random.default_rng(3)
    tokens = generator.integers(1, 50, 2000).astype(float)
    values = [np.stack([tokens * generator.gamma(2, 1, 2000), tokens], axis=1) for _ in range(2)]
    values[1][:, 0] = values[0][:, 0] * 0.9 + values[1][:, 0] * 0.102
    base, tuned = (
        ScoredRows("x", sparse.csr_array(each) if is_sparse else each, ratio, row_ids=np.arange(2000))
        for each in values
    )
    drawn = interval(base, seed=1), compare(base, tuned, seed=1)
    monkeypatch.setattr(resampling, "MAX_DRAWN_ROWS", 100)
    monkeypatch.setattr(resampling, "MAX_SWAPPED_ROWS", 100)
    normal = interval(base, seed=1), compare(base, tuned, seed=1)
    assert (normal[0].value, normal[1].value) == (drawn[0].value, drawn[1].value)
    for name in ("low", "high"):
        for one, other in zip(drawn, normal, strict=True):
            assert getattr(one, name) == pytest.approx(getattr(other, name), abs=0.1 * (one.high - one.low))
    assert 0.001 < drawn[1].p_value < 0.9
    assert normal[1].p_value == pytest.approx(drawn[1].p_value, abs=0.02)


def test_rare_classes_among_many_rows_are_not_taken_for_normal(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    num_rows, num_classes = 3000, 60
    shares = 1 / np.arange(1, num_classes + 1) ** 2
    references = generator.choice(num_classes, num_rows, p=shares / shares.sum())
    assert (np.bincount(references, minlength=num_classes) < 5).sum() > 20, "most classes are rare"

    def scored(accuracy: float) -> ScoredRows:
        is_wrong = generator.random(num_rows) > accuracy
        classes = np.where(is_wrong, generator.permutation(references), references)
        answered = ClassRows(classes, np.zeros(num_rows), np.ones(num_rows))
        rows = np.arange(num_rows)
        return score_classes(answered, references, rows, num_classes=num_classes, top_k=None)["macro_f1"]

    base, tuned = scored(0.8), scored(0.9)
    drawn = interval(tuned, seed=1), compare(base, tuned, seed=1)
    monkeypatch.setattr(resampling, "MAX_DRAWN_ROWS", 1000)
    monkeypatch.setattr(resampling, "MAX_SWAPPED_ROWS", 100)
    at_once = interval(tuned, seed=1), compare(base, tuned, seed=1)
    assert at_once[0].low < tuned.value < at_once[0].high
    for name in ("low", "high"):
        for one, other in zip(drawn, at_once, strict=True):
            assert getattr(other, name) == pytest.approx(getattr(one, name), abs=0.1 * (one.high - one.low))
    assert at_once[1].p_value == pytest.approx(drawn[1].p_value, abs=0.02)


def test_rows_that_both_models_do_alike_change_nothing_but_the_scale() -> None:
    base, tuned = drawn(3, 11)
    alone = compare(score(base), score(tuned), seed=1)
    same = np.full(5000, 0.5)
    among = compare(score([*base, *same]), score([*tuned, *same]), seed=1)
    assert among.p_value == pytest.approx(alone.p_value), "all swaps of the 11 rows, as before"


def macro_f1(sums: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    rows, predicted, right = np.split(sums, 3, axis=-1)
    f1 = 2 * right / np.maximum(rows + predicted, 1)
    return f1.sum(-1) / np.maximum((rows + predicted > 0).sum(-1), 1)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_score_of_counts_is_resampled_as_any_other(is_sparse: bool) -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    generator = np.random.default_rng(0)
    references = generator.integers(0, 4, 90)

    def scored(predictions: Any) -> ScoredRows:
        eye = np.eye(4)
        counts = np.hstack([eye[references], eye[predictions], eye[references] * (references == predictions)[:, None]])
        return ScoredRows(
            "macro_f1", sparse.csr_array(counts) if is_sparse else counts, macro_f1, row_ids=np.arange(90)
        )

    base = generator.integers(0, 4, 90)
    tuned = np.where(generator.random(90) < 0.7, references, base)
    found = interval(scored(tuned), seed=1)
    assert found.value == pytest.approx(sklearn.f1_score(references, tuned, average="macro"))
    # The same draws by hand.
    rows = np.random.default_rng([1, 0]).integers(0, 90, size=(resampling.NUM_RESAMPLES, 90))
    by_hand = [sklearn.f1_score(references[each], tuned[each], average="macro", zero_division=0) for each in rows[:200]]
    assert found.low == pytest.approx(np.quantile(by_hand, 0.025), abs=0.03)
    difference = compare(scored(base), scored(tuned), seed=1)
    assert difference.is_significant
    assert difference.low > 0.1
    assert scored(tuned).row_values.tolist() == pytest.approx((references == tuned).astype(float).tolist())
