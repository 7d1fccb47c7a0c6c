from __future__ import annotations

import numpy as np
import pytest

from lm_tuning.batching.step_plan import StepPlan
from lm_tuning.preflight.steps import choose_steps, describe_steps, measure_padding
from lm_tuning.text.store.table import TokenTable

TASKS = ("causal_lm", "sequence_classification", "seq2seq_lm")


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


def test_source_and_target_are_padded_each_by_itself():
    lengths = np.array([14, 12, 7, 10], dtype=np.int32)
    targets = np.array([4, 2, 5, 1], dtype=np.int32)  # sources of 10, 10, 2 and 9 tokens
    facts = measure_padding(
        plan_of(lengths),
        lengths,
        [0],
        micro_batch_tokens=30,
        batching="padded",
        max_length_tokens=20,
        targets=targets,
        max_target_tokens=8,
    )
    found = {choice["name"]: choice for choice in facts["choices"]}
    assert list(found) == ["fixed", "longest_row", "random", "padded"], "such rows are never packed"
    assert found["fixed"]["padding_fraction"] == 1 - 43 / (4 * 28)
    assert found["longest_row"]["padding_fraction"] == found["random"]["padding_fraction"] == 1 - 43 / (4 * 15)
    # Within 30 slots: the two of 14 and 12 tokens at 10 + 4, then those of 10 and 7 at 9 + 5.
    assert found["padded"]["padding_fraction"] == 1 - 43 / (2 * 14 + 2 * 14)
    assert found["padded"]["micro_batches_per_step"] == 2
    assert facts["longest_row_tokens"] == 15


@pytest.mark.parametrize("task_name", TASKS)
def test_it_agrees_with_the_batches_that_training_makes(tmp_path, task_name):
    from lm_tuning.batching.step_loader import StepDataset
    from lm_tuning.batching.tasks.registry import get_task
    from lm_tuning.text.store.table import TokenTableWriter
    from tests.support.stored import chat_row

    with TokenTableWriter(tmp_path / "train.arrow") as writer:
        for index in range(40):
            ids, spans = chat_row("q" * (1 + index % 13), "a" * (1 + index % 5))
            if task_name == "sequence_classification":
                writer.append(index, ids, [], label=index % 3)
            else:
                writer.append(index, ids, spans)
    table = TokenTable(tmp_path / "train.arrow")
    task = get_task(task_name, pad_id=0, decoder_start_id=2)
    plan = plan_of(table.lengths, effective_batch_rows=7)
    steps = choose_steps(plan)
    facts = measure_padding(
        plan,
        table.lengths,
        steps,
        micro_batch_tokens=48,
        batching="padded",
        max_length_tokens=64,
        targets=table.num_supervised if task_name == "seq2seq_lm" else None,
    )
    own = [choice for choice in facts["choices"] if choice["micro_batches_per_step"] is not None]
    assert [choice["name"] for choice in own] == (["padded", "packed"] if task.can_pack else ["padded"])
    for choice in own:
        dataset = StepDataset(table, plan, task, micro_batch_tokens=48, batching=choice["name"])
        batches = [dataset[step] for step in range(plan.total_steps)]
        slots, tokens = sum(batch.num_positions for batch in batches), sum(batch.num_tokens for batch in batches)
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
    assert (facts["is_sample"], facts["num_rows"], facts["of"]) == (True, 40, "run")
    assert describe_steps(plan_of(lengths, num_epochs=2), sample)["of"] == "first epoch"
    assert describe_steps(plan_of(lengths, max_steps=3), [0, 1, 2]) == {"num_steps": 3, "of": "run", "is_sample": False}
