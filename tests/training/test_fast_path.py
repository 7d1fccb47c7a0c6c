"""What makes steps fast is chosen by what the model is, says so, and changes no loss."""

from __future__ import annotations

import copy
import logging
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm_tuning.batching import head_loss, packed_attention
from lm_tuning.batching.head_loss import choose_head_loss
from lm_tuning.batching.losses import PLAIN
from lm_tuning.batching.tasks.base import TrainingTask
from lm_tuning.batching.tasks.registry import get_task
from lm_tuning.errors import UserError
from lm_tuning.text.store.table import open_split
from lm_tuning.training.kernels.compiled_layers import CompiledLayers, find_layers, pays
from lm_tuning.training.kernels.fast_path import install_fused_lora, prepare_fast_path, remove_fused_lora
from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training
from lm_tuning.training.setup.model import ReadyModel, set_up_model
from tests.support.rounding import SAME_LOSS
from tests.support.settings import vary
from tests.support.task_rows import label_map, save_tiny_bart, save_tiny_qwen3, write_task_rows
from tests.support.tiny import VOCABULARY, make_model, make_tokenizer

LORA = {"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"}


def make_mistral(**changes: Any) -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    small = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**small | changes))


def ready_of(model: Any) -> ReadyModel:
    return ReadyModel(model, make_tokenizer(), get_task("causal_lm", pad_id=0), has_fresh_head=False)


def packed_sum(ready: ReadyModel, table: Any, batching: Any) -> float:
    batch = ready.task.lay_out(table, list(range(len(table))), batching=batching)
    with torch.no_grad():
        return float(ready.task.sum_nats(ready.model, batch))


def test_packed_rows_have_the_loss_of_each_row_alone(paths: TrainingPaths, settings: TrainingSettings) -> None:
    table = open_split(paths.tokens, "train")
    ready = ready_of(make_model().eval())
    rows = [ready.task.logits_of_alike(ready.model, [table[row]], device="cpu") for row in range(len(table))]
    alone = sum(float(PLAIN.sum_nats(logits, targets)) for logits, targets in rows)
    fast = prepare_fast_path(ready, settings, table)
    assert fast.batching == "packed"
    assert "row by row" in fast.facts["batching"]
    assert "PyTorch" in fast.facts["head_loss"]
    batch = ready.task.lay_out(table, [3, 1, 2], batching="packed")
    assert batch.row_bounds is not None
    assert batch.row_bounds.tolist() == [0, *np.cumsum(table.lengths[[3, 1, 2]])]
    assert packed_sum(ready, table, "packed") == pytest.approx(alone, rel=SAME_LOSS)
    assert packed_sum(ready, table, "padded") == pytest.approx(alone, rel=SAME_LOSS)


def test_filling_up_to_whole_tiles_teaches_nothing_and_counts_as_padding(
    paths: TrainingPaths, settings: TrainingSettings
) -> None:
    table = open_split(paths.tokens, "train")
    ready = ready_of(make_model().eval())
    prepare_fast_path(ready, settings, table)
    plain = packed_sum(ready, table, "packed")
    ready.task.packing = replace(ready.task.packing, position_multiple=128)
    batch = ready.task.lay_out(table, [0, 1], batching="packed")
    assert batch.num_positions % 128 == 0
    assert batch.num_tokens == int(table.lengths[:2].sum()) < batch.num_positions
    assert packed_sum(ready, table, "packed") == pytest.approx(plain, rel=SAME_LOSS)


def test_a_model_that_looks_back_less_far_than_a_row_is_padded_and_says_why(
    paths: TrainingPaths, settings: TrainingSettings, caplog: pytest.LogCaptureFixture
) -> None:
    table = open_split(paths.tokens, "train")
    with caplog.at_level(logging.INFO):
        fast = prepare_fast_path(ready_of(make_mistral(sliding_window=8)), settings, table)
    assert fast.batching == "padded"
    assert "looks back 8 tokens" in caplog.text
    with pytest.raises(UserError, match="looks back 8 tokens"):
        prepare_fast_path(ready_of(make_mistral(sliding_window=8)), vary(settings, batching="packed"), table)


def test_rows_that_are_measured_while_training_count_for_how_far_a_model_looks_back(
    paths: TrainingPaths, settings: TrainingSettings
) -> None:
    table, longer = open_split(paths.tokens, "train"), open_split(paths.tokens, "train")
    longer.lengths = table.lengths + 1
    model = make_mistral(sliding_window=int(table.lengths.max()))
    assert prepare_fast_path(ready_of(model), settings, table, held_out_rows=longer).batching == "padded"
    assert prepare_fast_path(ready_of(model), settings, table, held_out_rows=table).batching == "packed"


@pytest.mark.parametrize(
    ("device", "attention", "batching"),
    [("cpu", "sdpa", "packed"), ("cpu", "eager", "packed"), ("cuda", "sdpa", "padded")],
)
def test_an_attention_that_the_user_chose_stays(
    paths: TrainingPaths, settings: TrainingSettings, device: str, attention: str, batching: str
) -> None:
    from lm_tuning.training.kernels.fast_path import _choose_batching

    ready = ready_of(make_model())
    ready.model.set_attn_implementation("sdpa" if attention == "sdpa" else "eager")
    fast = _choose_batching(ready, vary(settings, device=device, attention=attention), 40)
    assert fast.batching == batching
    assert f"model.attention = {attention}" in fast.facts["batching"]
    assert ready.model.config._attn_implementation == attention
    assert not ready.task.packing.by_bounds


def test_logits_that_a_model_changes_after_its_head_are_made_whole(settings: TrainingSettings) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=len(VOCABULARY), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, final_logit_softcapping=0.05,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(config)
    chosen, reason = choose_head_loss(model, np.array([5, 6, 7, 8]), device="cpu", compute_dtype="float32")
    assert chosen is None
    assert "changes them after its head" in reason
    untouched, _ = choose_head_loss(make_model(), np.array([5, 6, 7]), device="cpu", compute_dtype="float32")
    assert untouched is not None


def test_an_adapter_on_the_head_is_run_in_chunks() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make_model(tied=False), LoraConfig(r=2, target_modules=["lm_head", "q_proj"]))
    chosen, reason = choose_head_loss(model, np.array([5, 6, 7]), device="cpu", compute_dtype="float32")
    assert chosen is not None
    assert chosen.implementation is None
    assert "in chunks" in reason


def test_an_implementation_that_is_off_is_not_taken_however_fast_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    head = torch.nn.Linear(8, 20)

    def off(hidden: Any, weight: Any, bias: Any, targets: Any, smoothing: float) -> torch.Tensor:
        return hidden.sum() * 0 + 1

    def broken(*given: Any) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    seconds, said = head_loss._try_all(
        {"plain": head_loss.linear_sum_nats(torch.float32), "off": off, "broken": broken},
        head,
        torch.randn(40, 8),
        label_smoothing=0.0,
    )
    assert list(seconds) == ["plain"]
    assert "off is off by" in said
    assert "broken failed (RuntimeError)" in said


def test_what_waits_for_the_device_is_replaced_where_a_step_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    plain = head_loss.linear_sum_nats(torch.float32)
    seconds = {"PyTorch": 3.0, "PyTorch compiled": 2.0, "Liger": 1.0}
    monkeypatch.setattr(head_loss, "_candidates", lambda *given: dict.fromkeys(seconds, plain) | {"Liger": print})
    monkeypatch.setattr(head_loss, "_try_all", lambda *given, **more: (seconds, "three"))
    chosen, reason = choose_head_loss(make_model(), np.array([5, 6, 7]), device="cpu", compute_dtype="float32")
    assert chosen is not None
    assert chosen.name == "Liger"
    assert reason == "Liger, of three"
    assert chosen.for_recording().implementation is plain
    seconds.pop("Liger")
    chosen, _ = choose_head_loss(make_model(), np.array([5, 6, 7]), device="cpu", compute_dtype="float32")
    assert chosen is not None
    assert chosen.name == "PyTorch compiled"
    assert chosen.for_recording() is chosen


def test_a_short_run_waits_for_no_other_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = head_loss.linear_sum_nats(torch.float32)
    tried: list[bool] = []
    monkeypatch.setattr(head_loss, "_candidates", lambda *given: {"PyTorch": plain, "PyTorch compiled": print})
    monkeypatch.setattr(head_loss, "_try_all", lambda *given, **more: (tried.append(True) or {"PyTorch": 1.0}, "one"))
    model, row = make_model(), np.array([5, 6, 7])

    def choose(num_positions: float) -> str:
        chosen, reason = choose_head_loss(
            model, row, device="cpu", compute_dtype="float32", num_positions=num_positions
        )
        assert chosen is not None
        assert chosen.implementation is plain
        return reason

    # 4,000 positions of so few words are nothing; a billion times as many are worth a try.
    assert "PyTorch, in chunks, since a faster one would save 0.0 s and take 6 s" in choose(4_000)
    assert not tried
    assert choose(4e12) == "PyTorch, of one"
    assert tried


@pytest.mark.parametrize("task", ["causal_lm", "sequence_classification"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_run_has_the_losses_of_the_library_s_own_way(
    tmp_path: Path, settings: TrainingSettings, task: str, method: str
) -> None:
    tokens = write_task_rows(task, tmp_path / "tokens")
    settings = vary(
        settings,
        base={**settings.base, "name_or_path": str(save_tiny_qwen3(tmp_path / "model"))},
        task=task,
        label_map=label_map() if task != "causal_lm" else None,
        method=method,
        lora=LORA if method == "lora" else {},
    )
    fast = run_training(TrainingPaths(tokens, tmp_path / "fast"), settings)
    plain = run_training(
        TrainingPaths(tokens, tmp_path / "plain"), vary(settings, attention="eager", batching="padded")
    )
    name = next(name for name in fast.steps[0] if name.startswith("loss_nats_per_"))
    assert [row[name] for row in fast.steps] == pytest.approx([row[name] for row in plain.steps], rel=1e-3)
    assert fast.efficiency[0]["padding_fraction"] == 0
    assert plain.efficiency[0]["padding_fraction"] > 0
    assert "packed without padding" in fast.health["facts"]["fast_path"]["batching"]
    assert "model.attention = eager" not in fast.health["facts"]["fast_path"]["batching"]


def test_the_stored_model_carries_nothing_of_it(paths: TrainingPaths, settings: TrainingSettings) -> None:
    result = run_training(paths, vary(settings, max_steps=1))
    assert packed_attention.NAME not in (result.model_folder / "config.json").read_text()
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(result.model_folder).config._attn_implementation == "sdpa"


def test_an_encoder_decoder_is_padded(tmp_path: Path, settings: TrainingSettings) -> None:
    tokens = write_task_rows("seq2seq_lm", tmp_path / "tokens")
    settings = vary(
        settings,
        base={**settings.base, "name_or_path": str(save_tiny_bart(tmp_path / "bart"))},
        task="seq2seq_lm",
    )
    ready = set_up_model(settings)
    fast = prepare_fast_path(ready, settings, open_split(tokens, "train"))
    assert fast.batching == "padded"
    with pytest.raises(UserError, match="an encoder-decoder cannot be packed"):
        prepare_fast_path(ready, vary(settings, batching="packed"), open_split(tokens, "train"))


def test_what_goes_to_loader_workers_holds_no_weights() -> None:
    task: TrainingTask = get_task("causal_lm", pad_id=0)
    task.head_loss, _ = choose_head_loss(make_model(), np.array([5, 6]), device="cpu", compute_dtype="float32")
    assert task.head_loss is not None
    assert pickle.loads(pickle.dumps(task)).head_loss is None


class TestFusedAdapters:
    def model(self, **changes: Any) -> Any:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
        return get_peft_model(make_model(), LoraConfig(**settings | changes))

    def test_they_compute_what_the_library_does(self) -> None:
        model = self.model()
        ids = torch.tensor([[5, 6, 7, 8]])
        expected = model(input_ids=ids).logits
        wanted = torch.autograd.grad(expected.square().sum(), [p for p in model.parameters() if p.requires_grad])
        assert install_fused_lora(model) == 14
        found = model(input_ids=ids).logits
        torch.testing.assert_close(found, expected)
        got = torch.autograd.grad(found.square().sum(), [p for p in model.parameters() if p.requires_grad])
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-4)
        with model.disable_adapter():
            base = model(input_ids=ids).logits
        assert not torch.allclose(base, expected)
        remove_fused_lora(model)
        assert not any("forward" in vars(module) for module in model.modules() if hasattr(module, "lora_A"))

    def test_inputs_keep_their_type(self) -> None:
        model = self.model().to(torch.bfloat16)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()
        install_fused_lora(model)
        layer = model.get_base_model().model.layers[0].mlp.up_proj
        assert layer(torch.randn(3, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16
        layer(torch.randn(3, 32, dtype=torch.bfloat16)).sum().backward()
        assert layer.lora_B["default"].weight.grad.dtype == torch.float32

    @pytest.mark.parametrize("changes", [{"lora_dropout": 0.1}, {"use_dora": True}, {"lora_bias": True}])
    def test_special_ones_keep_the_library_s(self, changes: dict[str, Any]) -> None:
        assert install_fused_lora(self.model(**changes)) == 0


class TestCompiledLayers:
    def test_the_layers_are_the_decoder_s(self) -> None:
        model = make_model(num_layers=3)
        assert find_layers(model) == list(model.model.layers)
        assert find_layers(torch.nn.Linear(2, 2)) == []

    def test_compiling_pays_for_long_runs_alone(self) -> None:
        short, said = pays(num_tokens=1e5, parameters=4_000_000_000, flops=250e12)
        long, _ = pays(num_tokens=1e8, parameters=4_000_000_000, flops=250e12)
        assert (short, long) == (False, True)
        assert "to save" in said
        # A measured speed says more than what a card can do: small models wait for the host.
        slow, said = pays(num_tokens=1e5, parameters=4_000_000_000, flops=250e12, tokens_per_second=1000.0)
        assert slow
        assert "estimated at 100 s" in said

    def test_a_failure_from_before_a_resume_is_forgotten(self) -> None:
        model = make_model()
        facts: dict[str, Any] = {"compile_failure": "of another process"}
        CompiledLayers(find_layers(model), backend="eager").compile_with(
            lambda: model(torch.tensor([[5, 6, 7]])), facts
        )
        assert "compile_failure" not in facts
        assert facts["compile_seconds"] > 0

    def test_a_compiler_that_fails_leaves_plain_layers(self, caplog: pytest.LogCaptureFixture) -> None:
        model = make_model()
        layers = CompiledLayers(find_layers(model))
        ids = torch.tensor([[5, 6, 7]])
        expected = model(input_ids=ids).logits

        def fail() -> None:
            raise RuntimeError("no compiler here\nmore")

        facts: dict[str, Any] = {}
        before = torch.random.get_rng_state()
        layers.compile_with(fail, facts)
        assert facts["compile_failure"] == "RuntimeError: no compiler here"
        assert "could not be compiled (RuntimeError: no compiler here)" in caplog.text
        assert torch.equal(torch.random.get_rng_state(), before)
        torch.testing.assert_close(model(input_ids=ids).logits, expected)

    def test_a_block_can_run_without_them(self) -> None:
        model = make_model()
        layers = CompiledLayers(find_layers(model))
        layers.switch_on()
        calls = [layer._compiled_call_impl for layer in layers.layers]
        assert None not in calls
        with layers.paused():
            assert all(layer._compiled_call_impl is None for layer in layers.layers)
        assert [layer._compiled_call_impl for layer in layers.layers] == calls
        layers.switch_off()
        assert copy.deepcopy(model) is not None

    @pytest.mark.parametrize("method", ["lora", "qlora"])
    def test_the_same_graphs_serve_all_layers_and_sizes(
        self, paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch, method: str
    ) -> None:
        """A CPU has no variable-length kernel; an attention that looks the same to the tracer stands in for it."""
        from torch._dynamo.utils import counters

        def alike(module: Any, query: Any, key: Any, value: Any, mask: Any, **others: Any) -> tuple[Any, None]:
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2), None

        quantized = {"bits": 4, "quant_type": "nf4", "double_quant": True} if method == "qlora" else {}
        ready = set_up_model(vary(settings, method=method, lora=LORA, qlora=quantized))
        table = open_split(paths.tokens, "train")
        prepare_fast_path(ready, vary(settings, method=method), table)
        inner = ready.model.get_base_model()
        layers = CompiledLayers(find_layers(inner), embeddings=inner.get_input_embeddings(), backend="eager")
        torch._dynamo.reset()
        counters.clear()
        with monkeypatch.context() as patched:
            patched.setattr(packed_attention, "packed_attention", alike)
            packed_attention.register()
            layers.switch_on()
            for rows in ([0, 1, 2], [3, 4], [5], [6, 7, 8, 9]):
                batch = ready.task.lay_out(table, rows, batching="packed")
                ready.task.sum_nats(ready.model, batch).backward()
        packed_attention.register()
        assert len(layers.layers) > 1
        assert not counters["graph_break"]
        assert counters["stats"]["unique_graphs"] == 1, (
            "the first layer's too, whose input comes from frozen embeddings"
        )

    def test_frozen_embeddings_give_gradients_only_while_compiled_layers_learn(
        self, settings: TrainingSettings
    ) -> None:
        ready = set_up_model(vary(settings, method="lora", lora=LORA))
        inner = ready.model.get_base_model()
        embeddings = inner.get_input_embeddings()
        layers = CompiledLayers(find_layers(inner), embeddings=embeddings, backend="eager")
        ids = torch.tensor([[5, 6, 7]])
        layers.switch_on()
        layers.switch_on()
        assert embeddings(ids).requires_grad
        with torch.no_grad(), layers.paused():
            assert not embeddings(ids).requires_grad
        layers.switch_off()
        assert not embeddings(ids).requires_grad
        for parameter in layers.layers[0].parameters():
            parameter.requires_grad_(False)
        layers.switch_on()
        assert not embeddings(ids).requires_grad, "nothing before the second layer learns"
        layers.switch_off()

    @pytest.mark.slow
    @pytest.mark.parametrize("method", ["full", "lora"])
    def test_a_compiled_run_has_the_same_losses(
        self, paths: TrainingPaths, settings: TrainingSettings, method: str
    ) -> None:
        settings = vary(settings, method=method, lora=LORA if method == "lora" else {})
        plain = run_training(paths, vary(settings, attention="sdpa", batching="padded"))
        compiled = run_training(paths, vary(settings, attention="sdpa", batching="padded", compile=True))
        facts = compiled.health["facts"]
        assert "compile_failure" not in facts
        assert facts["compile_seconds"] > 0
        assert [row["loss_nats_per_token"] for row in compiled.steps] == pytest.approx(
            [row["loss_nats_per_token"] for row in plain.steps], rel=1e-3
        )


class TestReplanning:
    def fail_above(self, monkeypatch: pytest.MonkeyPatch, slots: int) -> list[int]:
        from lm_tuning.training.trainer import StepPlanTrainer

        seen: list[int] = []
        plain = StepPlanTrainer.micro_batch_loss

        def limited(self: Any, model: Any, micro_batch: Any, total: int) -> torch.Tensor:
            seen.append(micro_batch.num_positions)
            if micro_batch.num_positions > slots and self.state.global_step > 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
            return plain(self, model, micro_batch, total)

        monkeypatch.setattr(StepPlanTrainer, "micro_batch_loss", limited)
        return seen

    def test_a_step_that_does_not_fit_is_done_again_in_smaller_chunks(
        self, paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings = vary(settings, learning_rate=1e-3)
        whole = run_training(paths, settings)
        assert whole.efficiency[0]["num_micro_batches"] == 1
        self.fail_above(monkeypatch, 90)
        cut = run_training(replace(paths, checkpoints=paths.checkpoints / "cut"), settings)
        assert [row["loss_nats_per_token"] for row in cut.steps] == pytest.approx(
            [row["loss_nats_per_token"] for row in whole.steps], rel=1e-5
        )
        assert cut.efficiency[0]["num_micro_batches"] == 1
        assert all((row["num_micro_batches"] > 1) == (row["num_tokens"] > 90) for row in cut.efficiency[1:])
        findings = [finding for finding in cut.health["findings"] if finding["code"] == "memory-ran-out"]
        assert findings
        assert "in step 2" in findings[0]["measured"]

    def test_a_number_that_the_user_set_is_kept(
        self, paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.fail_above(monkeypatch, 90)
        with pytest.raises(UserError, match="ran out of memory in step 2"):
            run_training(paths, vary(settings, micro_batch_tokens=512))

    def test_it_ends_where_not_even_the_longest_row_fits(
        self, paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = self.fail_above(monkeypatch, 1)
        with pytest.raises(UserError, match="ran out of memory in step 2"):
            run_training(paths, settings)
        assert len(seen) < 20
