from __future__ import annotations

import numpy as np
import pytest

from lm_tuning.preflight.padding import choose_steps, measure_padding
from lm_tuning.training.step_plan import StepPlan


def plan_of(lengths: np.ndarray, **settings: int) -> StepPlan:
    return StepPlan(lengths, seed=0, **{"num_epochs": 1, "effective_batch_rows": 4} | settings)


def test_each_way_to_batch_has_its_share_of_padding():
    lengths = np.array([10, 20, 30, 40], dtype=np.int32)
    facts = measure_padding(
        plan_of(lengths), lengths, [0], micro_batch_tokens=80, batching="packed", max_length_tokens=50
    )
    found = {choice["name"]: choice for choice in facts["choices"]}
    assert found["fixed"]["padding_fraction"] == 1 - 100 / 200
    assert found["longest_row"]["padding_fraction"] == found["random"]["padding_fraction"] == 1 - 100 / 160
    # Sorted by length within 80 slots: 40 and 30 side by side, then 20 and 10.
    assert found["padded"]["padding_fraction"] == 1 - 100 / 120
    assert found["padded"]["micro_batches_per_step"] == found["packed"]["micro_batches_per_step"] == 2
    assert found["packed"]["padding_fraction"] == 0
    assert (facts["num_steps"], facts["num_rows"], facts["is_sample"]) == (1, 4, False)
    assert facts["num_rows_over_budget"] == 0


def test_it_agrees_with_the_batches_that_training_makes(tmp_path):
    from lm_tuning.training.batches import StepDataset
    from tests.support.stored import chat_row, write_rows

    rows = [chat_row("q" * (1 + place % 13), "a" * (1 + place % 5)) for place in range(40)]
    table = write_rows(rows, tmp_path / "train.arrow")
    plan = plan_of(table.lengths, effective_batch_rows=7)
    steps = choose_steps(plan)
    facts = measure_padding(plan, table.lengths, steps, micro_batch_tokens=48, batching="padded", max_length_tokens=64)
    for choice in facts["choices"][-2:]:
        dataset = StepDataset(table, plan, micro_batch_tokens=48, batching=choice["name"], pad_id=0)
        batches = [dataset[step] for step in range(plan.total_steps)]
        slots, tokens = sum(batch.num_slots for batch in batches), sum(batch.num_tokens for batch in batches)
        assert choice["padding_fraction"] == pytest.approx(1 - tokens / slots)
        num_batches = sum(len(batch.micro_batches) for batch in batches)
        assert choice["micro_batches_per_step"] == pytest.approx(num_batches / len(batches))


def test_all_steps_are_looked_at_or_a_sample_with_both_ends():
    lengths = np.full(1000, 10, dtype=np.int32)
    assert choose_steps(plan_of(lengths)) == list(range(250))
    assert choose_steps(plan_of(lengths, max_steps=3)) == [0, 1, 2]
    sample = choose_steps(plan_of(lengths), sample_rows=40)
    assert len(sample) == 10
    assert (sample[0], sample[-1]) == (0, 249)
    facts = measure_padding(
        plan_of(lengths), lengths, sample, micro_batch_tokens=80, batching="packed", max_length_tokens=50
    )
    assert (facts["is_sample"], facts["num_rows"], facts["of"]) == (True, 40, "first epoch")
