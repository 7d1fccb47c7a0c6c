"""Checks around the first step: a planted fault is named by its code; sound rows, models and gradients raise none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lm_tuning.batching.batch import MicroBatch, StepBatch
from lm_tuning.batching.step_loader import StepDataset
from lm_tuning.batching.step_plan import StepPlan
from lm_tuning.batching.tasks.registry import get_task
from lm_tuning.text.store.table import TokenTable, TokenTableWriter
from lm_tuning.training.health import batch_checks, table_checks
from lm_tuning.training.health.batch_checks import check_micro_batches, check_padding, check_rows
from lm_tuning.training.health.first_gradient import check_gradients
from lm_tuning.training.health.first_step import expected_fresh_head_loss
from lm_tuning.training.health.plain_loss import check_logits
from lm_tuning.training.health.report import Finding, HealthReport
from lm_tuning.training.health.table_checks import check_table, check_tokenizer, find_positions
from tests.support.tiny import ASSISTANT, BOS, END, PAD, USER, VOCABULARY, ids, make_model, make_tokenizer

Row = tuple[Sequence[int], Sequence[tuple[int, int]]]


def chat(question: str, answer: str, *, start: Sequence[int] = (), ends: bool = True) -> Row:
    prompt = [*start, USER, *ids(question), END, ASSISTANT]
    reply = [*ids(answer), *([END] if ends else [])]
    return [*prompt, *reply], [(len(prompt), len(prompt) + len(reply))]


def write(path: Path, rows: Sequence[Row], labels: Sequence[int] | None = None, batch_rows: int = 4096) -> TokenTable:
    with TokenTableWriter(path, batch_rows=batch_rows) as writer:
        for index, (row_ids, spans) in enumerate(rows):
            writer.append(100 + index, list(row_ids), list(spans), label=-1 if labels is None else labels[index])
    return TokenTable(path)


def codes(findings: Sequence[Finding]) -> list[str]:
    return [finding.code for finding in findings]


def only(findings: Sequence[Finding]) -> Finding:
    [finding] = findings
    return finding


SOUND = [chat("hi there", "yes"), chat("what", "a longer answer"), chat("why not", "no")]


def check(path: Path, rows: Sequence[Row], *, task: str = "causal_lm", model: Any = None, **options: Any) -> Any:
    table = write(path / "rows.arrow", rows, **options)
    return check_table(table, model or make_model(), make_tokenizer(), task=task)


# The token table


def test_sound_rows_raise_nothing(tmp_path: Path) -> None:
    facts, findings = check(tmp_path, SOUND)
    assert findings == []
    assert facts == {
        "rows_looked_at": 3,
        "largest_token_id": max(max(row) for row, _ in SOUND),
        "longest_row_tokens": max(len(row) for row, _ in SOUND),
        "rows_that_teach_nothing": 0,
        "rows_that_teach_the_end_fraction": 1.0,
    }


def test_an_empty_table_raises_nothing(tmp_path: Path) -> None:
    assert check(tmp_path, []) == ({}, [])


def test_two_bos(tmp_path: Path) -> None:
    rows = [chat("hi", "yes", start=[BOS, BOS]), chat("hi", "no", start=[BOS]), ([BOS], []), *SOUND]
    finding = only([found for found in check(tmp_path, rows)[1] if found.code != "rows-teach-nothing"])
    assert finding.code == "bos-doubled"
    assert finding.measured == "1 of 6 rows begins with two '<bos>'"


def test_no_end_that_is_supervised(tmp_path: Path) -> None:
    facts, findings = check(tmp_path, [chat("hi", "yes", ends=False), chat("hi", "no", ends=False)])
    assert only(findings).measured == "none of 2 rows has an EOS token that is supervised"
    assert only(findings).code == "end-not-taught"
    facts, findings = check(tmp_path, [chat("hi", "yes", ends=False), chat("hi", "no")])
    assert findings == []
    assert facts["rows_that_teach_the_end_fraction"] == 0.5


def test_a_newline_may_follow_the_end(tmp_path: Path) -> None:
    row, [(start, end)] = chat("hi", "yes")
    assert check(tmp_path, [([*row, *ids("\n")], [(start, end + 1)])])[1] == []
    # But the end of another part is no end that is supervised.
    assert codes(check(tmp_path, [([*row, *ids("\n")], [(end, end + 1)])])[1]) == ["end-not-taught"]


def test_rows_that_teach_nothing_by_their_number(tmp_path: Path) -> None:
    silent = ([USER, *ids("hi"), END], [])
    finding = only(check(tmp_path, [*SOUND, silent])[1])
    assert (finding.code, finding.severity) == ("rows-teach-nothing", "warn")
    assert finding.measured == "1 of 4 rows (25.0%) has nothing that is supervised, such as row 103"
    finding = only(check(tmp_path, [*SOUND, silent, silent])[1])
    assert finding.measured == "2 of 5 rows (40.0%) have nothing that is supervised, such as rows 103, 104"
    finding = only(check(tmp_path, [*SOUND * 50, silent])[1])
    assert finding.severity == "note"


def test_ids_that_the_model_does_not_embed_stop(tmp_path: Path) -> None:
    row, spans = SOUND[0]
    finding = only(check(tmp_path, [*SOUND, ([*row[:2], len(VOCABULARY), *row[3:]], spans)])[1])
    assert (finding.code, finding.severity) == ("id-beyond-vocabulary", "stop")
    assert finding.measured == f"the rows hold token ids from 0 to {len(VOCABULARY)}"
    assert finding.expected == f"ids from 0 to {len(VOCABULARY) - 1}, which the model embeds"


def test_classes_that_the_head_does_not_have_stop(tmp_path: Path) -> None:
    model = make_model()
    model.config.num_labels = 3
    rows = [(ids("one"), []), (ids("two"), [])]
    assert check(tmp_path, rows, task="sequence_classification", model=model, labels=[0, 2])[1] == []
    finding = only(check(tmp_path, rows, task="sequence_classification", model=model, labels=[0, 3])[1])
    assert (finding.code, finding.severity) == ("class-beyond-head", "stop")
    assert "1 of 2 rows has such a class (row 101)." in finding.cause


def test_rows_longer_than_the_positions(tmp_path: Path) -> None:
    model = make_model()
    model.config.max_position_embeddings = 20
    rows = [*SOUND, chat("a question that is long", "yes"), chat("hi", "n" * 25)]
    finding = only(check(tmp_path, rows, model=model)[1])
    assert (finding.code, finding.severity) == ("rows-longer-than-positions", "warn")
    assert finding.measured.startswith("3 of 5 rows are longer than 20 tokens, the longest has 31")
    # A source and a target have positions of their own.
    assert codes(check(tmp_path, rows[:3], model=model, task="seq2seq_lm")[1]) == []
    assert codes(check(tmp_path, rows[:4], model=model, task="seq2seq_lm")[1]) == ["rows-longer-than-positions"]


def test_a_large_table_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = SOUND * 10
    monkeypatch.setattr(table_checks, "TOKENS_CHECKED", sum(len(row) for row, _ in rows) // 5)
    facts, findings = check(tmp_path, rows, batch_rows=3)
    assert findings == []
    assert 3 <= facts["rows_looked_at"] <= 6


def test_later_batches_of_a_file_count_with_their_own_offsets(tmp_path: Path) -> None:
    rows = [*SOUND * 3, chat("hi", "yes", start=[BOS, BOS])]
    facts, findings = check(tmp_path, rows, batch_rows=2)
    assert only(findings).measured == "1 of 10 rows begins with two '<bos>'"
    assert facts["rows_that_teach_the_end_fraction"] == 1.0


def config_of(**values: Any) -> Any:
    return SimpleNamespace(config=SimpleNamespace(**values), named_modules=lambda: iter(()))


def test_positions_of_several_architectures() -> None:
    from transformers import BartConfig, BartForConditionalGeneration, GPT2Config, GPT2LMHeadModel, T5Config

    gpt2 = GPT2LMHeadModel(
        GPT2Config(vocab_size=8, n_positions=16, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    )
    assert find_positions(gpt2) == table_checks.Positions(16, are_learned=True)
    bart = BartForConditionalGeneration(
        BartConfig(
            vocab_size=40,
            max_position_embeddings=24,
            d_model=8,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=1,
            decoder_attention_heads=1,
            encoder_ffn_dim=8,
            decoder_ffn_dim=8,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
            forced_eos_token_id=2,
        )
    )
    assert find_positions(bart) == table_checks.Positions(24, are_learned=True)
    assert find_positions(make_model()) == table_checks.Positions(512, are_learned=False)
    assert find_positions(SimpleNamespace(config=T5Config(), named_modules=lambda: iter(()))) is None
    stretched = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}
    assert find_positions(config_of(max_position_embeddings=1000, rope_parameters=stretched)) == table_checks.Positions(
        4000, are_learned=False
    )


# Tokenizer and model


def test_a_tokenizer_and_its_model_raise_nothing() -> None:
    assert check_tokenizer(make_tokenizer(), make_model()) == []


def test_more_tokens_than_embeddings_stop() -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<one>", "<two>"])
    finding = only(check_tokenizer(tokenizer, make_model()))
    assert (finding.code, finding.severity) == ("more-tokens-than-embeddings", "stop")
    count = len(VOCABULARY)
    assert finding.measured == f"the tokenizer has {count + 2} tokens, the model embeds {count}"


def test_a_vocabulary_that_is_padded_up_is_normal_and_a_far_larger_one_a_note() -> None:
    model = make_model()
    model.resize_token_embeddings(112)
    assert check_tokenizer(make_tokenizer(), model) == []
    model.resize_token_embeddings(160)
    finding = only(check_tokenizer(make_tokenizer(), model))
    assert (finding.code, finding.severity) == ("fewer-tokens-than-embeddings", "note")


@pytest.mark.parametrize("configured", [None, 5])
def test_a_pad_id_that_the_configuration_lacks(configured: int | None) -> None:
    model = make_model()
    model.config.pad_token_id = configured
    finding = only(check_tokenizer(make_tokenizer(), model))
    assert (finding.code, finding.severity) == ("pad-id-not-in-config", "warn")
    assert finding.measured == f"the model's configuration has the pad id {configured}, the tokenizer {PAD}"


def test_padding_with_the_end_is_a_note() -> None:
    model = make_model()
    model.config.pad_token_id = END
    finding = only(check_tokenizer(make_tokenizer(pad_token="<|end|>"), model))
    assert (finding.code, finding.severity) == ("pad-is-eos", "note")


# Micro-batches


def make_steps(path: Path, rows: Sequence[Row], *, task: str = "causal_lm", batching: Any = "padded") -> StepDataset:
    table = write(path / "rows.arrow", rows)
    plan = StepPlan(
        table.lengths, seed=1, effective_batch_rows=len(rows), effective_batch_tokens=None, num_epochs=1, max_steps=None
    )
    return StepDataset(
        table, plan, get_task(task, pad_id=PAD, decoder_start_id=END), micro_batch_tokens=40, batching=batching
    )


PAIRS = [
    ([*ids(source), END, *ids(target), END], [(len(source) + 1, len(source) + len(target) + 2)])
    for source, target in (("a source", "target"), ("another one", "t"), ("x", "y"), ("four", "five"))
]


@pytest.mark.parametrize("batching", ["padded", "packed"])
def test_a_sound_first_step_raises_nothing(tmp_path: Path, batching: str) -> None:
    health = HealthReport()
    check_rows(health, make_model(), make_tokenizer(), make_steps(tmp_path, SOUND, batching=batching))
    assert health.findings == []
    assert health.facts["rows_looked_at"] == 3


def test_a_sound_step_of_sources_and_targets_raises_nothing(tmp_path: Path) -> None:
    health = HealthReport()
    check_rows(health, make_model(), make_tokenizer(), make_steps(tmp_path, PAIRS, task="seq2seq_lm"))
    assert health.findings == []


def test_faults_are_reported_together_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = make_steps(tmp_path, [chat("hi", "yes", start=[BOS, BOS], ends=False), chat("hi", "no", ends=False)])
    health = HealthReport()
    model = make_model()
    model.config.pad_token_id = None
    for _ in range(2):
        check_rows(health, model, make_tokenizer(), steps)
    assert codes(health.findings) == ["pad-id-not-in-config", "end-not-taught", "bos-doubled"]


def test_a_step_that_teaches_nothing_stops(tmp_path: Path) -> None:
    batch = make_steps(tmp_path, SOUND)[0]
    empty = [replace(micro, num_supervised=0) for micro in batch.micro_batches]
    assert check_micro_batches(batch, pad_id=PAD) == []
    finding = only(check_micro_batches(StepBatch(0, batch.row_ids, empty), pad_id=PAD))
    assert (finding.code, finding.severity) == ("step-teaches-nothing", "stop")


def pair_batch(ids_and_mask: tuple[list[list[int]], list[list[int]] | None]) -> StepBatch:
    """Sources of 3 and 2 tokens, targets of 1 each."""
    grid, mask = ids_and_mask
    return StepBatch(
        0,
        [1, 2],
        [
            MicroBatch(
                input_ids=torch.tensor(grid),
                position_ids=None,
                kept_positions=torch.arange(1),
                targets=torch.tensor([[9], [9]]),
                num_supervised=2,
                num_tokens=7,
                num_rows=2,
                attention_mask=None if mask is None else torch.tensor(mask),
                decoder_input_ids=torch.tensor([[2], [2]]),
            )
        ],
    )


GRID = [[11, 12, 13], [11, 12, PAD]]


@pytest.mark.parametrize(
    ("grid", "mask", "words"),
    [
        (GRID, None, "an encoder reads 1 padded positions, since there is no mask"),
        (GRID, [[1, 1, 1], [1, 1, 1]], "the mask shows 6 positions of 5 real tokens"),
        (GRID, [[1, 1, 1], [1, 0, 0]], "the mask shows 4 positions of 5 real tokens"),
        (GRID, [[1, 1, 1], [0, 1, 1]], "the mask has holes, or hides the beginning of rows"),
        (GRID, [[1, 1, 1], [0, 0, 0]], "the mask hides all of row 2"),
        ([[11, 12, PAD], [11, 12, 13]], [[1, 1, 1], [1, 1, 0]], "the mask hides something that is not padding"),
    ],
)
def test_a_mask_that_is_not_the_padding_stops(grid: Any, mask: Any, words: str) -> None:
    finding = only(check_micro_batches(pair_batch((grid, mask)), pad_id=PAD))
    assert (finding.code, finding.severity) == ("mask-not-padding", "stop")
    assert finding.measured == f"in micro-batch 1 of step 1 {words}"


def test_a_right_mask_and_none_where_nothing_is_padded() -> None:
    assert check_micro_batches(pair_batch((GRID, [[1, 1, 1], [1, 1, 0]])), pad_id=PAD) == []
    # A token that is real and happens to be the pad token is shown.
    assert check_micro_batches(pair_batch(([[11, 12, PAD], [11, 12, PAD]], [[1, 1, 1], [1, 1, 0]])), pad_id=PAD) == []
    batch = pair_batch(([[11, 12], [11, 12]], None))
    batch.micro_batches[0].num_tokens = 6
    assert check_micro_batches(batch, pad_id=PAD) == []


def test_padding_to_a_fixed_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = make_steps(tmp_path, SOUND)
    sound = StepDataset.__getitem__

    def pad_further(self: StepDataset, step: int) -> StepBatch:
        batch = sound(self, step)
        for micro in batch.micro_batches:
            micro.input_ids = torch.nn.functional.pad(micro.input_ids, (0, 64 - micro.input_ids.shape[1]), value=PAD)
        return batch

    monkeypatch.setattr(StepDataset, "__getitem__", pad_further)
    health = HealthReport()
    check_rows(health, make_model(), make_tokenizer(), steps)
    finding = only(health.findings)
    assert (finding.code, finding.severity) == ("padding-above-plan", "warn")
    tokens = sum(len(row) for row, _ in SOUND)
    assert finding.measured == f"{1 - tokens / (3 * 64):.1%} of the first step's positions are padding"


def test_padding_is_compared_with_what_the_lengths_ask_for(tmp_path: Path) -> None:
    batch = make_steps(tmp_path, SOUND)[0]
    assert check_padding(batch, num_positions_expected=batch.num_positions) == []
    assert check_padding(batch, num_positions_expected=int(0.97 * batch.num_positions)) == []
    assert codes(check_padding(batch, num_positions_expected=batch.num_tokens // 2)) == ["padding-above-plan"]


@pytest.mark.parametrize(
    ("task", "batching", "advises"),
    [("causal_lm", "padded", True), ("causal_lm", "packed", False), ("seq2seq_lm", "padded", False)],
)
def test_packing_is_advised_where_it_can_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, batching: str, advises: bool
) -> None:
    steps = make_steps(tmp_path, PAIRS, task=task, batching=batching)
    monkeypatch.setattr(batch_checks, "count_positions", lambda *_: 1)
    padded = [finding for finding in batch_checks.check_batch_layout(steps) if finding.code == "padding-above-plan"]
    assert padded
    assert {"train.batching=packed" in finding.change for finding in padded} == {advises}


# Logits


def logits_of(**values: float) -> dict[str, float]:
    return {"mean": 0.5, "variance_over_classes": 4.0, "min": -9.0, "max": 21.0, **values}


@pytest.mark.parametrize(
    ("values", "dtype", "code"),
    [
        ({}, "float32", None),
        # GPT-2's logits lie far under zero, which a softmax does not see.
        ({"mean": -95.0, "min": -130.0, "max": -60.0}, "float32", None),
        ({"min": -math.inf, "variance_over_classes": math.nan}, "float32", None),
        ({"mean": math.nan}, "float32", "logits-not-finite"),
        ({"max": math.inf}, "float16", "logits-not-finite"),
        ({"variance_over_classes": 901.0}, "float32", "logits-out-of-range"),
        ({"max": 1.1e4}, "float32", "logits-out-of-range"),
        ({"min": -2e3}, "float32", None),
        ({"min": -2e3}, "bfloat16", "logits-out-of-range"),
        ({"variance_over_classes": 0.0, "min": 0.0, "max": 0.0, "mean": 0.0}, "float32", "logits-flat"),
    ],
)
def test_logits_are_checked_against_sound_ones(values: dict[str, float], dtype: str, code: str | None) -> None:
    assert codes(check_logits(logits_of(**values), dtype=dtype)) == ([] if code is None else [code])


def test_a_new_head_may_start_with_equal_logits() -> None:
    flat = logits_of(variance_over_classes=0.0, min=0.0, max=0.0, mean=0.0)
    assert check_logits(flat, has_fresh_head=True) == []


def test_the_numbers_of_the_logits_are_said() -> None:
    finding = only(check_logits(logits_of(variance_over_classes=1600.0)))
    assert finding.measured == "logits have a mean of 0.5, a spread of 40 and lie between -9 and 21 (float32)"
    assert finding.severity == "warn"


def test_a_fresh_head_of_equal_logits_starts_at_log_of_the_classes() -> None:
    assert expected_fresh_head_loss(torch.zeros(5, 280)) == pytest.approx((math.log(280), 0.0))


def test_the_expectation_of_a_fresh_head_by_hand() -> None:
    logits = torch.tensor([[1.0, -1.0], [2.0, -2.0], [1.0, -1.0], [2.0, -2.0]])
    # Variances 1, 4, 1, 4: mean 2.5; four deviations of a mean of 4 rows.
    expected, band = expected_fresh_head_loss(logits)
    assert expected == pytest.approx(math.log(2) + 1.25)
    assert band == pytest.approx(4 * math.sqrt(2.5 / 4))
    # Three of four rows in one class scatter like 1 / (9/16 + 1/16) = 1.6 rows.
    assert expected_fresh_head_loss(logits, torch.tensor([0, 0, 1, 0]))[1] == pytest.approx(4 * math.sqrt(2.5 / 1.6))


@pytest.mark.parametrize("num_classes", [2, 77, 280])
@pytest.mark.parametrize("shared", [0.0, 0.98], ids=["rows differ", "rows share a state"])
def test_random_heads_start_within_the_band(num_classes: int, shared: float) -> None:
    """A hundred heads: 4 standard deviations should hold all of them, whatever the classes and however alike rows."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        state = torch.randn(64, generator=generator)
        hidden = math.sqrt(shared) * state + math.sqrt(1 - shared) * torch.randn(24, 64, generator=generator)
        head = 0.12 * torch.randn(num_classes, 64, generator=generator)
        labels = torch.randint(num_classes, (24,), generator=generator)
        logits = hidden @ head.T
        loss = float(torch.nn.functional.cross_entropy(logits, labels))
        expected, band = expected_fresh_head_loss(logits, labels)
        assert abs(loss - expected) <= band + 0.02 * expected


# Gradients


def test_a_sound_backward_pass_raises_nothing() -> None:
    model = make_model()
    model(input_ids=torch.tensor([[5, 9, 10]]), labels=torch.tensor([[5, 9, 10]])).loss.backward()
    assert check_gradients(model) == []


def test_the_zeros_of_a_new_adapter_are_no_finding() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make_model(), LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    model(input_ids=torch.tensor([[5, 9, 10]]), labels=torch.tensor([[5, 9, 10]])).loss.backward()
    firsts = [parameter for name, parameter in model.named_parameters() if "lora_A" in name]
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in firsts)
    assert check_gradients(model) == []


def test_a_trained_parameter_without_gradient_is_named() -> None:
    model = make_model()
    for index in range(7):
        model.register_parameter(f"unused_{index}", torch.nn.Parameter(torch.zeros(2)))
    model(input_ids=torch.tensor([[5, 9, 10]]), labels=torch.tensor([[5, 9, 10]])).loss.backward()
    finding = only(check_gradients(model))
    assert (finding.code, finding.severity) == ("parameter-without-gradient", "warn")
    trained = sum(1 for _ in model.parameters())
    assert finding.measured == (
        f"7 of {trained} trained parameters have no gradient: "
        "unused_0, unused_1, unused_2, unused_3, unused_4 and 2 more"
    )


def test_nothing_that_has_a_gradient_stops() -> None:
    finding = only(check_gradients(make_model()))
    assert (finding.code, finding.severity) == ("nothing-has-gradient", "stop")
    frozen = make_model().requires_grad_(False)
    assert codes(check_gradients(frozen)) == ["nothing-has-gradient"]


def test_a_frozen_parameter_with_a_gradient_is_named() -> None:
    model = make_model()
    model(input_ids=torch.tensor([[5, 9, 10]]), labels=torch.tensor([[5, 9, 10]])).loss.backward()
    model.model.norm.weight.requires_grad_(False)
    finding = only(check_gradients(model))
    assert (finding.code, finding.severity) == ("frozen-parameter-has-gradient", "warn")
    assert finding.measured == "1 frozen parameter has a gradient: model.norm.weight"
