"""Products over 16-bit copies of trained weights compute what autocast computes, and leave what it leaves."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lm_tuning.runtime.precision import autocast
from lm_tuning.training import job as job_module
from lm_tuning.training.kernels import fast_path, weight_copies
from lm_tuning.training.kernels.compiled_layers import CompiledLayers, find_layers
from lm_tuning.training.kernels.weight_copies import (
    WeightCopies,
    choose_weight_copies,
    count_copy_bytes,
    install_weight_copies,
    remove_weight_copies,
)
from lm_tuning.training.planning.memory import measure_model
from lm_tuning.training.planning.out_of_memory import MemoryReading
from lm_tuning.training.results import TrainingResult
from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training
from lm_tuning.training.setup.model import freeze_modules
from lm_tuning.training.trainer import StepPlanTrainer
from tests.support.replaying import CallingRecorder
from tests.support.settings import vary
from tests.support.tiny import VOCABULARY, make_model

Gradients = dict[str, torch.Tensor | None]
needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class PowerFailure(BaseException):
    """What a test ends a training with; nothing between may catch it."""


def make_qwen2() -> Any:
    """Return a model whose products of attention have biases."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = Qwen2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def passes(model: Any, dtype: str, *, device: str = "cpu", count: int = 2) -> tuple[list[float], Gradients]:
    """Return the losses of some micro-batches of a step, and the gradients that they add up to."""
    model.zero_grad(set_to_none=True)
    losses = []
    for index in range(count):
        generator = torch.Generator().manual_seed(index)
        token_ids = torch.randint(8, len(VOCABULARY), (2, 12 + 5 * index), generator=generator).to(device)
        with autocast(device, dtype):
            loss = model(input_ids=token_ids, labels=token_ids, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
    return losses, {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(found: tuple[list[float], Gradients], wanted: tuple[list[float], Gradients], tolerance: float) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=tolerance)
    for name, gradient in wanted[1].items():
        other = found[1][name]
        assert (gradient is None) == (other is None), name
        if gradient is not None and other is not None:
            assert other.dtype == gradient.dtype
            assert float((other - gradient).norm()) <= tolerance * float(gradient.norm()), name


def run_plain(model: Any) -> None:
    """Leave the layers as they are."""


def run_checkpointed(model: Any) -> None:
    model.activation_checkpointing_enable()


def run_compiled(model: Any) -> None:
    inner = model.model
    CompiledLayers(find_layers(inner), inner.embed_tokens, backend="aot_eager").switch_on()


@pytest.mark.parametrize("make", [make_model, make_qwen2])
@pytest.mark.parametrize("prepare", [run_plain, run_checkpointed, run_compiled])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 0.0)])
def test_losses_and_gradients_are_those_of_autocast(
    make: Callable[[], Any], prepare: Callable[[Any], None], dtype: str, tolerance: float
) -> None:
    model = make().train()
    ours = copy.deepcopy(model)
    install_weight_copies(ours, getattr(torch, dtype))
    prepare(model)
    prepare(ours)
    # The CPU rounds a weight's gradient to 16 bits as autocast does; a bias is added up in another order.
    tolerance = tolerance if make is make_model or dtype == "float32" else 1e-2
    assert_same(passes(ours, dtype), passes(model, dtype), tolerance)


def test_frozen_weights_keep_the_layers_own_product() -> None:
    model = make_model().train()
    freeze_modules(model, ["embed_tokens", "layers.0", "*.q_proj"])
    ours = copy.deepcopy(model)
    copies = install_weight_copies(ours)
    assert len(copies.copies) == 6, "all of the second layer but its query"
    found = passes(ours, "bfloat16")
    assert_same(found, passes(model, "bfloat16"), 0.0)
    assert found[1]["model.layers.1.self_attn.q_proj.weight"] is None


def test_copies_are_read_in_training_alone_and_follow_the_weights_when_told() -> None:
    model = make_model().train()
    copies = install_weight_copies(model)
    before, _ = passes(model, "bfloat16", count=1)
    with torch.no_grad():
        for master in copies.masters:
            master.mul_(3.0)
    assert passes(model, "bfloat16", count=1)[0] == before, "the copies are what is multiplied with"
    plain = copy.deepcopy(model)
    remove_weight_copies(plain)
    wanted, _ = passes(plain, "bfloat16", count=1)
    assert wanted != before
    assert passes(model.eval(), "bfloat16", count=1)[0] == wanted
    copies.refresh()
    assert passes(model.train(), "bfloat16", count=1)[0] == wanted


def test_what_is_stored_counted_and_trained_of_a_model_stays_the_same() -> None:
    model = make_model()
    state, names = {*model.state_dict()}, [name for name, _ in model.named_parameters()]
    weights = measure_model(model, {}).weights
    copies = install_weight_copies(model)
    assert {*model.state_dict()} == state
    assert [name for name, _ in model.named_parameters()] == names
    assert copies.num_bytes == count_copy_bytes(model) == 2 * sum(master.numel() for master in copies.masters) > 0
    held = measure_model(model, {})
    assert (held.copies, held.weights) == (copies.num_bytes, weights)
    remove_weight_copies(model)
    assert count_copy_bytes(model) == 0
    assert not any("forward" in vars(module) for module in model.modules())


def test_where_copies_do_not_pay_the_reason_is_said(
    settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reason(model: Any, **changes: Any) -> str:
        copies, said = choose_weight_copies(model, replace(settings, **changes))
        assert copies is None
        assert count_copy_bytes(model) == 0
        return said

    assert "training runs on the CPU" in reason(make_model())
    assert "products are made in float16" in reason(make_model(), device="cuda", compute_dtype="float16")
    on_gpu: dict[str, Any] = {"device": "cuda", "compute_dtype": "bfloat16"}
    assert "no decoder layer" in reason(make_model().bfloat16(), **on_gpu)
    model = make_model()
    held = measure_model(model, {})
    needed = held.weights + held.buffers + held.gradients + held.optimizer_state
    card = MemoryReading("a card", total=0, used=0, peak=0, others=1000)
    wanted = sum(module.weight.numel() for module in weight_copies.find_trained_products(model)) * 2
    fraction = settings.train.memory_fraction

    def read(total: float) -> None:
        reading = replace(card, total=math.ceil(total))
        monkeypatch.setattr("lm_tuning.training.planning.out_of_memory.read_memory", lambda device: reading)

    read((needed + 1000 + 4 * wanted - 50) / fraction)
    assert "more than a quarter of the" in reason(model, **on_gpu)
    read((needed + 1000 + 4 * wanted + 50) / fraction)
    copies, said = choose_weight_copies(model, replace(settings, **on_gpu))
    assert isinstance(copies, WeightCopies)
    assert copies.num_bytes == wanted
    assert said.startswith("bfloat16 copies for 14 products")


# ------------------------------------------------------------------------------------------------------ whole trainings


@pytest.fixture
def train(
    paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., TrainingResult]:
    """Return what trains in bfloat16, with copies or without."""
    settings = vary(settings, compute_dtype="bfloat16", micro_batch_tokens=60, max_steps=8)

    def run(name: str, *, with_copies: bool = True, **changes: Any) -> TrainingResult:
        monkeypatch.setattr(weight_copies, "_DEVICES", ("cpu",) if with_copies else ())
        where = replace(paths, checkpoints=paths.checkpoints / name)
        result = run_training(where, vary(settings, **changes))
        facts: Any = result.health["facts"]["fast_path"]
        assert facts["weights"].startswith("bfloat16 copies" if with_copies else "no 16-bit copies")
        return result

    return run


def rows_of(result: TrainingResult) -> list[tuple[Any, ...]]:
    return [(row["loss_nats_per_token"], row["gradient_norm"]) for row in result.steps]


def weights_of(result: TrainingResult) -> dict[str, torch.Tensor]:
    [file] = result.model_folder.glob("*.safetensors")
    return load_file(file)


def assert_same_training(found: TrainingResult, wanted: TrainingResult) -> None:
    assert rows_of(found) == rows_of(wanted)
    assert found.evaluations == wanted.evaluations or [{**row, "seconds": 0} for row in found.evaluations] == [
        {**row, "seconds": 0} for row in wanted.evaluations
    ]
    ours, theirs = weights_of(found), weights_of(wanted)
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert ours[name].dtype == torch.float32
        assert torch.equal(ours[name], weight), name


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_training_with_copies_is_the_training_without(
    train: Callable[..., TrainingResult], checkpointing: bool
) -> None:
    options = {"gradient_checkpointing": checkpointing, "eval_every_steps": 3, "freeze": ["layers.0.mlp"]}
    found = train("copies", **options)
    assert sum(row["num_micro_batches"] for row in found.efficiency) > len(found.steps)
    assert "16-bit copies" in {row["part"] for row in found.batch_plan.memory}
    assert len(found.evaluations) == 3
    assert_same_training(found, train("plain", with_copies=False, **options))


def test_a_resume_is_the_unbroken_training(
    train: Callable[..., TrainingResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    unbroken = train("whole")
    step = StepPlanTrainer.training_step

    def fail(self: StepPlanTrainer, model: Any, inputs: Any, count: Any = None) -> torch.Tensor:
        if inputs.step == 5:
            raise PowerFailure
        return step(self, model, inputs, count)

    with monkeypatch.context() as patch:
        patch.setattr(StepPlanTrainer, "training_step", fail)
        with pytest.raises(PowerFailure):
            train("broken", save_every_steps=2)
    resumed = train("broken", save_every_steps=2, resume=True)
    assert resumed.health["facts"]["resumed_from_step"] == 4
    assert_same_training(resumed, unbroken)


def test_an_update_that_is_not_finite_is_left_out_as_ever(
    train: Callable[..., TrainingResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = StepPlanTrainer.micro_batch_loss

    def spoiled(self: StepPlanTrainer, model: Any, micro_batch: Any, total: Any) -> torch.Tensor:
        value = loss(self, model, micro_batch, total)
        return value * float("nan") if self.state.global_step == 3 else value

    monkeypatch.setattr(StepPlanTrainer, "micro_batch_loss", spoiled)
    options: dict[str, Any] = {"health": {"on_mismatch": "warn"}}
    found, wanted = train("copies", **options), train("plain", with_copies=False, **options)
    assert math.isnan(rows_of(found)[3][1])
    assert math.isfinite(rows_of(found)[4][1])
    for name, weight in weights_of(wanted).items():
        assert torch.equal(weights_of(found)[name], weight), name


def test_replayed_steps_have_the_same_gradients(
    train: Callable[..., TrainingResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = CallingRecorder()
    for module in (fast_path, job_module):
        monkeypatch.setattr(module, "find_recorder", lambda device: recorder)
    options: dict[str, Any] = {"cuda_graphs": True, "micro_batch_tokens": 4096, "max_steps": 40, "num_epochs": None}
    found = train("copies", **options)
    assert sum(each.num_replays for each in recorder.recordings) > 10
    wanted = train("plain", with_copies=False, **options)
    torch.testing.assert_close(rows_of(found), rows_of(wanted), rtol=1e-3, atol=0)


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("prepare", [run_plain, run_checkpointed, "inductor"])
@pytest.mark.parametrize("make", [make_model, make_qwen2])
def test_on_a_gpu_gradients_are_rounded_less_than_those_of_autocast(make: Callable[[], Any], prepare: Any) -> None:
    model = make().train().cuda()
    exact = passes(model, "float32", device="cuda")
    exact = exact[0], {name: None if part is None else part.clone() for name, part in exact[1].items()}
    ours = copy.deepcopy(model)
    install_weight_copies(ours)
    for each in (model, ours):
        if prepare == "inductor":
            CompiledLayers(find_layers(each.model), each.model.embed_tokens).switch_on()
        else:
            prepare(each)
    (found, of_ours), (wanted, of_plain) = (passes(each, "bfloat16", device="cuda") for each in (ours, model))
    assert found == pytest.approx(wanted, rel=1e-3)

    def off(gradients: Gradients) -> float:
        pairs = [(part, exact[1][name]) for name, part in gradients.items()]
        apart = sum(float((a - b).square().sum()) for a, b in pairs if a is not None and b is not None)
        return math.sqrt(apart / sum(float(b.square().sum()) for _, b in pairs if b is not None))

    assert off(of_ours) <= 1.1 * off(of_plain) < 0.1


@pytest.mark.gpu
@needs_card
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_a_training_takes_copies_by_itself(
    paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch, compiled: bool, graphs: bool
) -> None:
    settings = vary(
        settings,
        device="cuda",
        compute_dtype="bfloat16",
        compile=compiled,
        cuda_graphs=graphs,
        micro_batch_tokens=4096 if graphs else 60,
        max_steps=40,
        num_epochs=None,
        learning_rate=1e-4,
        num_loader_workers=0,
    )
    found = run_training(replace(paths, checkpoints=paths.checkpoints / "copies"), settings)
    facts: Any = found.health["facts"]["fast_path"]
    assert facts["weights"].startswith("bfloat16 copies"), facts
    assert "compile_failure" not in found.health["facts"]
    if graphs:
        assert facts["cuda_graphs"].startswith("yes"), facts
    monkeypatch.setattr(weight_copies, "_DEVICES", ())
    wanted = run_training(replace(paths, checkpoints=paths.checkpoints / "plain"), settings)
    torch.testing.assert_close(
        [row["loss_nats_per_token"] for row in found.steps],
        [row["loss_nats_per_token"] for row in wanted.steps],
        rtol=5e-3,
        atol=0,
    )
