"""Trainings with frozen layers in 8 bits, what leaves them in 16, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_tuning.errors import UserError
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.training import run as run_module
from lm_tuning.training.kernels import fp8, fp8_trial
from lm_tuning.training.results import TrainingResult
from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training
from lm_tuning.training.trainer import StepPlanTrainer
from tests.support.cards import needs_fp8
from tests.support.replaying import CallingRecorder
from tests.support.settings import base_record, make_settings, vary
from tests.support.tiny import make_model, make_tokenizer

LORA: dict[str, Any] = {"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"}
BFLOAT16 = {"weights_dtype": "bfloat16", "compute_dtype": "bfloat16"}


class PowerFailure(BaseException):
    """What a test ends a training with; nothing between may catch it."""


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU pass for a device with such products; it makes them in float32."""
    monkeypatch.setattr(fp8, "why_no_device", lambda device: None)


@pytest.fixture
def lora(settings: TrainingSettings, tiny_model_folder: Path) -> TrainingSettings:
    """A training of twelve steps with an adapter."""
    return make_settings(
        tiny_model_folder, method="lora", lora=LORA, learning_rate=1e-2, effective_batch_rows=6, max_steps=12,
        compile=False, fp8=True, **BFLOAT16,
    )  # fmt: skip


def train(
    paths: TrainingPaths,
    settings: TrainingSettings,
    name: str = "fp8",
    on_progress: OnProgress = ignore_progress,
    **changes: Any,
) -> TrainingResult:
    where = replace(paths, checkpoints=paths.checkpoints / name)
    return run_training(where, vary(settings, **changes), on_progress=on_progress)


def losses_of(result: TrainingResult) -> list[float]:
    return [row["loss_nats_per_token"] for row in result.steps]  # type: ignore[misc]


def verdict(result: TrainingResult) -> str:
    facts: Any = result.health["facts"]["fast_path"]
    return str(facts["fp8"])


def codes_of(result: TrainingResult) -> list[str]:
    return [finding["code"] for finding in result.health["findings"]]


# ---------------------------------------------------------------------------------------------------- trainings


def test_a_training_is_near_one_in_bfloat16_and_leaves_the_base_as_it_was(
    paths: TrainingPaths, lora: TrainingSettings, emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[dict[str, torch.Tensor]] = []
    save = run_module.save_tuned_model

    def save_and_look(model: Any, *given: Any, **named: Any) -> Path:
        linears = [module for module in model.modules() if type(module) is torch.nn.Linear]
        assert not any("forward" in module.__dict__ or "fp8_weight" in module.__dict__ for module in linears)
        stored.append({name: tensor.clone() for name, tensor in model.state_dict().items() if "lora_" not in name})
        return save(model, *given, **named)

    monkeypatch.setattr(run_module, "save_tuned_model", save_and_look)
    plain = train(paths, lora, "plain", fp8=False, eval_every_steps=4)
    found = train(paths, lora, eval_every_steps=4)
    assert verdict(found) == "yes: 14 frozen layers, 0.00 GiB in two layouts beside those in 16 bits"
    assert "fp8" not in plain.health["facts"]["fast_path"]  # type: ignore[operator]
    assert not codes_of(found)
    torch.testing.assert_close(losses_of(found), losses_of(plain), rtol=1e-3, atol=0)
    assert losses_of(found) != losses_of(plain)
    facts: Any = found.health["facts"]
    first = facts["fp8_first_step"]
    assert 0 < first["relative_difference"] < first["bound"] == 0.01
    assert first["fp8_nats_per_token"] == pytest.approx(losses_of(found)[0], rel=1e-4)
    assert first["bfloat16_nats_per_token"] == pytest.approx(losses_of(plain)[0], rel=1e-4)
    # Before the adapter has changed anything, both are measured in 16 bits.
    key = "validation_nats_per_token"
    assert found.evaluations[0][key] == plain.evaluations[0][key]
    assert found.evaluations[-1][key] == pytest.approx(plain.evaluations[-1][key], rel=5e-3)
    of_plain, of_found = stored
    assert {name: torch.equal(tensor, of_plain[name]) for name, tensor in of_found.items()} == dict.fromkeys(
        of_plain, True
    )


def test_weights_that_wait_on_the_host_change_nothing(
    paths: TrainingPaths, lora: TrainingSettings, emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = train(paths, lora, "kept", eval_every_steps=4)
    monkeypatch.setattr(fp8, "KEPT_SHARE", 0.0)
    waiting = train(paths, lora, "waiting", eval_every_steps=4)
    assert verdict(waiting).endswith("in the place of those in 16 bits, which wait in the host's memory")
    assert losses_of(waiting) == losses_of(kept)
    key = "validation_nats_per_token"
    assert [row[key] for row in waiting.evaluations] == [row[key] for row in kept.evaluations]


def test_a_model_that_reads_such_a_weight_by_another_way_goes_on_in_bfloat16(
    paths: TrainingPaths, lora: TrainingSettings, emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        gate, up = (
            layer.base_layer if hasattr(layer, "base_layer") else layer for layer in (self.gate_proj, self.up_proj)
        )
        both = torch.nn.functional.linear(x, torch.cat([gate.weight, up.weight])).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(both[0]) * both[1])

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    monkeypatch.setattr(fp8, "KEPT_SHARE", 0.0)
    found = train(paths, lora, lora=LORA | {"target_modules": ["q_proj", "down_proj"]})
    assert "have a loss of nan nats per token in 8 bits" in verdict(found)
    assert all(math.isfinite(loss) for loss in losses_of(found))


def test_a_resume_goes_on_as_if_nothing_had_been(paths: TrainingPaths, lora: TrainingSettings, emulated: None) -> None:
    check_resume(paths, vary(lora, eval_every_steps=3))


@pytest.mark.parametrize("changes", [{"gradient_checkpointing": True}, {"micro_batch_tokens": 64}], ids=str)
def test_how_a_step_is_made_changes_next_to_nothing(
    paths: TrainingPaths, lora: TrainingSettings, emulated: None, changes: dict[str, Any]
) -> None:
    once = train(paths, lora, "once")
    other = train(paths, lora, "other", **changes)
    assert verdict(other).startswith("yes")
    torch.testing.assert_close(losses_of(other), losses_of(once), rtol=2e-4, atol=0)


def test_replayed_steps_are_those_without_graphs(
    paths: TrainingPaths, lora: TrainingSettings, emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = CallingRecorder()
    for module in ("job", "kernels.fast_path"):
        monkeypatch.setattr(f"lm_tuning.training.{module}.find_recorder", lambda device: recorder)
    plain = train(paths, lora, "plain", cuda_graphs=False, max_steps=30)
    found = train(paths, lora, "replayed", cuda_graphs=True, max_steps=30)
    assert recorder.recordings[0].num_replays > 10
    facts: Any = found.health["facts"]["fast_path"]
    assert facts["fp8"].startswith("yes"), "and what is said of graphs later leaves it"
    assert "replayed" in facts["cuda_graphs"]
    torch.testing.assert_close(losses_of(found), losses_of(plain), rtol=1e-3, atol=0)


def test_a_step_that_is_not_finite_is_skipped(
    paths: TrainingPaths, lora: TrainingSettings, emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = StepPlanTrainer.micro_batch_loss

    def spoil(self: StepPlanTrainer, *given: Any) -> torch.Tensor:
        loss = compute(self, *given)
        return loss * math.nan if self.state.global_step == 4 else loss

    monkeypatch.setattr(StepPlanTrainer, "micro_batch_loss", spoil)
    result = train(paths, lora)
    skipped: Any = result.health["facts"]["steps_not_finite"]
    assert [each["step"] for each in skipped] == [5]
    assert all(math.isfinite(loss) for loss in losses_of(result)[5:])


# ---------------------------------------------------------------------------------------------------- without it


def fail(*given: Any) -> torch.Tensor:
    raise RuntimeError("no such kernel\non this card")


FAILURES: dict[str, tuple[dict[str, Any], str]] = {
    "another loss": (
        {"fp8_trial.LOSS_BOUND": 0.0, "fp8_trial.LOSS_BOUND_NATS": 0.0},
        "in bfloat16, which is further off than 0%",
    ),
    "no number": (
        {"fp8.scaled_product": lambda left, right, *scales: torch.full((len(left), len(right)), math.nan).bfloat16()},
        "have a loss of nan nats per token in 8 bits",
    ),
    "no kernel": ({"fp8.scaled_product": fail}, "a try failed (RuntimeError: no such kernel)"),
}


def plant(monkeypatch: pytest.MonkeyPatch, case: str) -> str:
    """Plant a failure; return what is said of it."""
    changes, said = FAILURES[case]
    for name, value in changes.items():
        monkeypatch.setattr(f"lm_tuning.training.kernels.{name}", value)
    return said


@pytest.mark.parametrize("case", FAILURES)
def test_what_speaks_against_it_is_a_finding_and_the_run_goes_on_in_bfloat16(
    paths: TrainingPaths, lora: TrainingSettings, emulated: None, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    plain = train(paths, lora, "plain", fp8=False)
    said = plant(monkeypatch, case)
    found = train(paths, lora)
    assert verdict(found).startswith("no, since")
    assert said in verdict(found)
    [finding] = found.health["findings"]
    assert (finding["code"], finding["severity"]) == ("fp8-not-used", "warn")
    assert said in finding["measured"]
    assert losses_of(found) == losses_of(plain)


def test_a_resume_stays_in_bfloat16(
    paths: TrainingPaths, lora: TrainingSettings, emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as planted:
        plant(planted, "another loss")
        train(paths, lora, "broken", max_steps=6, save_every_steps=6)
    resumed = train(paths, lora, "broken", resume=True)
    assert verdict(resumed) == "no, since it was so before the resume"
    assert codes_of(resumed) == ["fp8-not-used"]
    assert losses_of(resumed) == losses_of(train(paths, lora, "plain", fp8=False))


def test_the_user_may_have_it_end_the_run(
    paths: TrainingPaths, lora: TrainingSettings, emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, "no kernel")
    with pytest.raises(UserError, match="fp8-not-used"):
        train(paths, lora, health={"severity": {"fp8-not-used": "stop"}})


def test_a_run_too_short_for_compiled_layers_goes_without(lora: TrainingSettings) -> None:
    model = make_lora_model()
    short = vary(lora, device="cuda", compile="auto")
    layers, said = fp8_trial.choose_fp8(model, short, compiles=False)
    assert said == f"no, since {layers.why_not}"
    for settings, compiles in ((short, True), (vary(short, compile=False), False)):
        layers, said = fp8_trial.choose_fp8(model, settings, compiles=compiles)
        assert (layers.why_not, said) == (None, "to be tried at step 1 in 14 frozen layers, as train.fp8 says")


def make_lora_model() -> Any:
    from lm_tuning.parameters.train import LoraParameters
    from lm_tuning.training.setup.adapters import add_lora

    return add_lora(make_model(), LoraParameters.model_validate(LORA))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "training runs on the CPU, and such products need a CUDA card. Set train.fp8 = false."),
        ({"method": "full"}, "train.method = full trains all weights"),
        ({"method": "qlora"}, "train.method = qlora holds the frozen weights in fewer bits already"),
        ({"lora": LORA | {"use_dora": True}}, "train.lora.use_dora = true reads"),
        ({"precision": "float32"}, "but train.precision = float32"),
        ({"task": "seq2seq_lm"}, "but task = seq2seq_lm has encoder and decoder"),
    ],
    ids=["cpu", "full", "qlora", "dora", "float32", "seq2seq"],
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(
    paths: TrainingPaths, lora: TrainingSettings, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError) as caught:
        train(paths, vary(lora, base={**lora.base, "name_or_path": "/nowhere"}), **changes)
    [problem] = [each for each in caught.value.problems if "train.fp8" in each]
    assert told in problem


def test_arithmetic_in_another_dtype_is_refused(paths: TrainingPaths, lora: TrainingSettings, emulated: None) -> None:
    with pytest.raises(UserError, match=r"this run computes in float32 \(train\.precision\)"):
        train(paths, lora, compute_dtype="float32")


def test_a_model_of_other_sizes_is_refused(
    paths: TrainingPaths, lora: TrainingSettings, emulated: None, tmp_path: Path
) -> None:
    make_model(hidden_size=24).save_pretrained(tmp_path / "odd")
    make_tokenizer().save_pretrained(tmp_path / "odd")
    with pytest.raises(UserError, match=r"the sides of its layers are 12, 24, 48, .* Set train\.fp8 = false"):
        train(paths, vary(lora, base=base_record(tmp_path / "odd")))


def test_an_older_card_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Old Card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    assert fp8.why_no_device("cuda") == "Old Card has compute capability 8.6, and such products need 8.9"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert fp8.why_no_device("cuda") is None
    monkeypatch.delattr(torch, "_scaled_mm")
    assert "has no product of scaled matrices" in str(fp8.why_no_device("cuda"))


# ---------------------------------------------------------------------------------------------------- on a card


@pytest.fixture
def on_gpu(lora: TrainingSettings) -> TrainingSettings:
    return vary(lora, device="cuda")


@pytest.mark.gpu
@needs_fp8
@pytest.mark.parametrize("options", [{}, {"compile": True}, {"gradient_checkpointing": True}, {"cuda_graphs": True}],
                         ids=str)  # fmt: skip
def test_on_a_gpu_a_training_is_near_one_in_bfloat16(
    paths: TrainingPaths, on_gpu: TrainingSettings, options: dict[str, Any]
) -> None:
    changes = {"max_steps": 40, "eval_every_steps": 20, **options}
    plain = train(paths, on_gpu, "plain", fp8=False, **changes)
    found = train(paths, on_gpu, **changes)
    assert verdict(found).startswith("yes: 14 frozen layers"), verdict(found)
    assert "compile_failure" not in found.health["facts"]
    torch.testing.assert_close(losses_of(found), losses_of(plain), rtol=0.02, atol=0.02)
    assert losses_of(found) != losses_of(plain)


@pytest.mark.gpu
@needs_fp8
@pytest.mark.parametrize("kept_share", [1.0, 0.0])
def test_on_a_gpu_a_resume_goes_on_as_if_nothing_had_been(
    paths: TrainingPaths, on_gpu: TrainingSettings, kept_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, "KEPT_SHARE", kept_share)
    check_resume(paths, vary(on_gpu, compile=True, eval_every_steps=3))


def check_resume(paths: TrainingPaths, settings: TrainingSettings) -> None:
    """Compare a training that was broken off with one that was not."""
    whole = train(paths, settings, "whole", save_every_steps=6)

    def fail(what: str, step: int, total: int, unit: str) -> None:
        if what == "Training" and step == 8:
            raise PowerFailure

    with pytest.raises(PowerFailure):
        train(paths, settings, "broken", on_progress=fail, save_every_steps=6)
    resumed = train(paths, settings, "broken", resume=True, save_every_steps=6)
    assert resumed.health["facts"]["resumed_from_step"] == 6
    assert verdict(resumed).startswith("yes")
    assert losses_of(resumed) == losses_of(whole)
    assert [row["step"] for row in resumed.evaluations] == [row["step"] for row in whole.evaluations]
