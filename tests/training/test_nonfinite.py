"""An update that is NaN or infinite leaves weights and optimizer as they were, and its step can be run again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_tuning.batching.batch import MicroBatch, StepBatch
from lm_tuning.training.health.nonfinite import GuardsUpdates, guard_update, load_reproduction, save_reproduction
from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training
from lm_tuning.training.trainer import StepPlanTrainer

MakeOptimizer = Callable[[list[torch.nn.Parameter]], Any]


def adafactor(parameters: list[torch.nn.Parameter]) -> Any:
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=1e-2, scale_parameter=False, relative_step=False, weight_decay=0.1)


def eight_bit(parameters: list[torch.nn.Parameter]) -> Any:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, lr=1e-2, weight_decay=0.1)


OPTIMIZERS: dict[str, tuple[MakeOptimizer, str]] = {
    "fused AdamW": (lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True), "device"),
    "fused Adam": (lambda parameters: torch.optim.Adam(parameters, lr=1e-2, fused=True), "device"),
    "fused SGD": (lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, fused=True), "host"),
    "fused Adagrad": (lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2, fused=True), "device"),
    "AdamW": (lambda parameters: torch.optim.AdamW(parameters, lr=1e-2), "host"),
    "SGD": (lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=0.1), "host"),
    "RMSprop": (lambda parameters: torch.optim.RMSprop(parameters, lr=1e-2), "host"),
    "Adagrad": (lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2), "host"),
    "Adafactor": (adafactor, "host"),
    "8-bit AdamW": (eight_bit, "host"),
}


def make_parameters() -> list[torch.nn.Parameter]:
    """Large enough that bitsandbytes keeps 8-bit states."""
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((96, 64), (64,))]


def one_update(optimizer: Any, parameters: list[torch.nn.Parameter], seed: int, scale: float = 1.0) -> str:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    guard = guard_update(optimizer, norm)
    optimizer.step()
    optimizer.zero_grad()
    return guard


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bad_update_is_as_if_it_had_never_been(name: str, bad: float) -> None:
    make, decides = OPTIMIZERS[name]
    parameters, reference = make_parameters(), make_parameters()
    optimizer, reference_optimizer = make(parameters), make(reference)
    for seed in (1, 2, 3):
        one_update(optimizer, parameters, 100 + seed, scale=bad)  # the first one too, when there is no state yet
        assert one_update(reference_optimizer, reference, seed) == decides
        assert one_update(optimizer, parameters, seed) == decides
    for parameter, expected in zip(parameters, reference, strict=True):
        assert torch.equal(parameter, expected)
        assert not torch.equal(parameter, make_parameters()[0 if parameter.ndim == 2 else 1])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bad_first_update_leaves_the_weights(name: str) -> None:
    parameters = make_parameters()
    optimizer = OPTIMIZERS[name][0](parameters)
    one_update(optimizer, parameters, 1, scale=math.nan)
    for parameter, before in zip(parameters, make_parameters(), strict=True):
        assert torch.equal(parameter, before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_nothing_waits_for_the_decision() -> None:
    parameters = [torch.nn.Parameter(parameter.detach().cuda()) for parameter in make_parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=True)
    for scale in (1.0, math.nan, 1.0):
        before = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, scale)
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        torch.cuda.set_sync_debug_mode("error")
        assert guard_update(optimizer, norm) == "device"
        optimizer.step()
        torch.cuda.set_sync_debug_mode("default")
        changed = [not torch.equal(one, other) for one, other in zip(parameters, before, strict=True)]
        assert changed == [scale == 1.0] * 2


def test_without_the_guard_a_bad_update_ruins_the_weights() -> None:
    parameters = make_parameters()
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=True)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, math.nan)
    optimizer.step()
    assert all(parameter.isnan().all() for parameter in parameters)


def test_a_norm_that_is_a_plain_number_will_do() -> None:
    parameters = make_parameters()
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=True)
    parameters[0].grad = torch.ones_like(parameters[0])
    assert guard_update(optimizer, math.inf) == "device"
    optimizer.step()
    assert torch.equal(parameters[0], make_parameters()[0])
    assert guard_update(optimizer, 1.0) == "device"
    optimizer.step()
    assert not torch.equal(parameters[0], make_parameters()[0])


def scaled_run(*, guarded: bool, fused: bool) -> tuple[list[torch.Tensor], list[float]]:
    """Train with float16's gradient scaler through accelerate's wrapper; the second step overflows."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)
    parameters = make_parameters()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    inner = torch.optim.AdamW(parameters, lr=1e-2, fused=fused)
    optimizer = AcceleratedOptimizer(inner, device_placement=False, scaler=scaler)
    scales = []
    for step in range(4):
        loss = sum((parameter.square().mean() for parameter in parameters), torch.zeros(()))
        scaler.scale(loss * (math.inf if step == 1 else 1.0)).backward()
        scaler.unscale_(inner)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        if guarded:
            assert guard_update(optimizer, norm) == "scaler"
        optimizer.step()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return [parameter.detach().clone() for parameter in parameters], scales


@pytest.mark.parametrize("fused", [True, False])
def test_the_gradient_scaler_of_float16_is_left_to_itself(fused: bool) -> None:
    guarded, scales = scaled_run(guarded=True, fused=fused)
    plain, plain_scales = scaled_run(guarded=False, fused=fused)
    assert all(torch.equal(one, other) for one, other in zip(guarded, plain, strict=True))
    assert all(weights.isfinite().all() for weights in guarded)
    assert scales == plain_scales == [1024.0, 512.0, 512.0, 512.0]


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"numbers": torch.full((8,), float(index + 1))}


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(numbers) - 1).square().mean()}


def weights_after_each_step(
    tmp_path: Path, *, optim: str, max_grad_norm: float, guarded: bool, bad_step: int | None
) -> list[torch.Tensor]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Plain(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss: torch.Tensor = model(**inputs)["loss"]
            return loss * math.nan if self.state.global_step == bad_step else loss

    class Guarded(GuardsUpdates, Plain):
        pass

    weights: list[torch.Tensor] = []

    class Keep(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            weights.append(kwargs["model"].layer.weight.detach().clone())

    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        optim=optim,
        max_grad_norm=max_grad_norm,
        per_device_train_batch_size=1,
        max_steps=4,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        logging_nan_inf_filter=False,
    )
    (Guarded if guarded else Plain)(model=Line(), args=arguments, train_dataset=Rows(), callbacks=[Keep()]).train()
    return weights


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_the_trainer_skips_the_step_and_goes_on(tmp_path: Path, optim: str, max_grad_norm: float) -> None:
    options: dict[str, Any] = {"optim": optim, "max_grad_norm": max_grad_norm}
    first, second, third, fourth = weights_after_each_step(tmp_path, guarded=True, bad_step=1, **options)
    assert torch.equal(first, second)
    assert third.isfinite().all()
    assert not torch.equal(second, third)
    assert not torch.equal(third, fourth)
    ruined = weights_after_each_step(tmp_path, guarded=False, bad_step=1, **options)
    assert ruined[-1].isnan().all()
    sound = weights_after_each_step(tmp_path, guarded=True, bad_step=None, **options)
    plain = weights_after_each_step(tmp_path, guarded=False, bad_step=None, **options)
    assert all(torch.equal(one, other) for one, other in zip(sound, plain, strict=True))


def test_a_run_goes_on_after_a_bad_step_and_says_which(
    paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    sound = StepPlanTrainer.micro_batch_loss

    def break_step_3(self: StepPlanTrainer, model: Any, micro_batch: MicroBatch, total: int) -> torch.Tensor:
        loss = sound(self, model, micro_batch, total)
        return loss * math.nan if self.state.global_step == 2 else loss

    monkeypatch.setattr(StepPlanTrainer, "micro_batch_loss", break_step_3)
    result = run_training(paths, settings)
    [finding] = result.health["findings"]
    assert (finding["code"], finding["severity"]) == ("loss-not-finite", "warn")
    assert finding["measured"].startswith("step 3 has a loss of nan and a gradient norm of nan: its update was skipped")
    [listed] = result.health["facts"]["steps_not_finite"]
    again = load_reproduction(Path(listed["saved"]))
    assert again.step == 2
    assert again.row_ids == listed["row_ids"]
    assert again.num_supervised == result.steps[2]["num_supervised_tokens"]
    assert result.health["facts"]["num_updates"] == 5
    json.dumps(result.health, allow_nan=False)
    weights = [tensor for path in result.model_folder.glob("*.safetensors") for tensor in load_file(path).values()]
    assert weights
    assert all(tensor.isfinite().all() for tensor in weights)
    assert math.isfinite(result.steps[3]["loss_nats_per_token"])


def test_a_step_can_be_run_again_from_its_file(tmp_path: Path) -> None:
    packed = MicroBatch(
        input_ids=torch.tensor([[5, 6, 7, 8]]),
        position_ids=torch.tensor([[0, 1, 0, 1]]),
        kept_positions=torch.tensor([0, 2]),
        targets=torch.tensor([[6, 8]]),
        num_supervised=2,
        num_tokens=4,
        num_rows=2,
    )
    pair = MicroBatch(
        input_ids=torch.tensor([[5, 0]]),
        position_ids=None,
        kept_positions=torch.tensor([], dtype=torch.int64),
        targets=torch.tensor([[9]]),
        num_supervised=1,
        num_tokens=2,
        num_rows=1,
        attention_mask=torch.tensor([[1, 0]]),
        decoder_input_ids=torch.tensor([[2]]),
    )
    batch = StepBatch(step=16, row_ids=[31, 7, 12], micro_batches=[packed, pair])
    path = save_reproduction(tmp_path / "not-finite", 17, batch, seed=7, facts={"loss": math.nan, "scale": 2.0})
    assert path == tmp_path / "not-finite" / "step-17.json"
    content = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (content["step"], content["seed"], content["row_ids"]) == (17, 7, [31, 7, 12])
    assert content["facts"] == {"loss": "nan", "scale": 2.0}
    again = load_reproduction(path)
    assert (again.step, again.row_ids) == (16, [31, 7, 12])
    for micro, expected in zip(again.micro_batches, batch.micro_batches, strict=True):
        assert (micro.num_supervised, micro.num_tokens, micro.num_rows) == (
            expected.num_supervised,
            expected.num_tokens,
            expected.num_rows,
        )
        for name in ("input_ids", "position_ids", "kept_positions", "targets", "attention_mask", "decoder_input_ids"):
            one, other = getattr(micro, name), getattr(expected, name)
            assert (one is None and other is None) or (torch.equal(one, other) and one.dtype == torch.int64), name
