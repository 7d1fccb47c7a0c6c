"""Resuming with something changed goes on where that changes nothing, and is refused where it makes another run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lm_tuning.errors import UserError
from lm_tuning.text.store.table import TokenTableWriter
from lm_tuning.training.checkpoints import format as checkpoints
from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training
from tests.support.rounding import SAME_LOSS
from tests.support.settings import vary
from tests.support.tiny import END, ids

LORA: dict[str, Any] = {"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"}
Stopped = tuple[TrainingPaths, TrainingSettings]


class PowerFailure(BaseException):
    """What a test ends a training with; nothing between may catch it."""


@pytest.fixture
def equal_rows(tmp_path: Path) -> Path:
    """Sixteen training rows of twelve tokens."""
    folder = tmp_path / "equal"
    folder.mkdir()
    for split, count in (("train", 16), ("validation", 0), ("test", 0)):
        with TokenTableWriter(folder / f"{split}.arrow") as writer:
            for row in range(count):
                writer.append(row + 1, [*ids(f"say {row:02}: {row * 7 % 100:03}"), END][:12], [(8, 12)])
    return folder


@pytest.fixture
def stopped_at_2(equal_rows: Path, settings: TrainingSettings, tmp_path: Path) -> Stopped:
    """A run of two epochs, two rows per micro-batch and two of those a step, with a checkpoint of step 2 of 8."""
    paths = TrainingPaths(equal_rows, tmp_path / "checkpoints")
    chosen = vary(
        settings,
        effective_batch_rows=4,
        num_epochs=2,
        max_steps=None,
        micro_batch_tokens=24,
        batching="padded",
        save_every_steps=2,
    )

    def stop(what: str, done: int, total: int | None, unit: str) -> None:
        if what == "Training" and done == 3:
            raise PowerFailure

    with pytest.raises(PowerFailure):
        run_training(paths, chosen, on_progress=stop)
    latest = checkpoints.find_latest(paths.checkpoints)
    assert latest is not None
    assert latest.step == 2
    return paths, chosen


def test_another_cut_of_the_same_steps_goes_on(stopped_at_2: Stopped, tmp_path: Path) -> None:
    paths, settings = stopped_at_2
    unbroken = run_training(TrainingPaths(paths.tokens, tmp_path / "unbroken"), settings)
    done: list[int] = []
    wider = vary(settings, micro_batch_tokens=48, resume=True)
    resumed = run_training(paths, wider, on_progress=lambda what, step, total, unit: done.append(step))
    assert done == [2, 3, 4, 5, 6, 7, 8]  # where it goes on, and six further steps
    assert [row["num_micro_batches"] for row in resumed.efficiency] == [2, 2, *[1] * 6]
    losses = [row["loss_nats_per_token"] for row in resumed.steps]
    assert losses == pytest.approx([row["loss_nats_per_token"] for row in unbroken.steps], rel=1e-5)


def test_another_effective_batch_is_refused_with_both_sizes(
    stopped_at_2: Stopped,
) -> None:
    paths, settings = stopped_at_2
    with pytest.raises(UserError, match=r"another effective batch: train\.effective_batch_rows: 4 -> 8\n"):
        run_training(paths, vary(settings, effective_batch_rows=8, micro_batch_tokens=48, resume=True))
    tokens = {"effective_batch_rows": None, "effective_batch_tokens": 48}
    named = r"train\.effective_batch_rows: 4 -> null, train\.effective_batch_tokens: null -> 48\n"
    with pytest.raises(UserError, match=named):
        run_training(paths, vary(settings, **tokens, resume=True))
    assert len(list(paths.checkpoints.glob("run-*/checkpoint-2"))) == 1


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"tokens_key": "tokens-2"}, "another token set .*'tokens-1', this run 'tokens-2'"),
        ({"base": {"digest": "base-2"}}, "another base model: .*'base-1', this run 'base-2'"),
        ({"seed": 8}, "another order of rows"),
        ({"method": "lora", "lora": LORA}, r"another method or adapter: train\.method: full -> lora\n"),
    ],
)
def test_what_makes_it_another_run_is_refused(stopped_at_2: Stopped, other: dict[str, Any], words: str) -> None:
    paths, settings = stopped_at_2
    changed = {**other, "base": {**settings.base, **other.get("base", {})}}
    with pytest.raises(UserError, match=words):
        run_training(paths, vary(settings, resume=True, **changed))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lora": {**LORA, "r": 8}}, "train.lora.r: 4 -> 8"),
        (
            {"lora": {**LORA, "use_dora": True, "target_modules": ["q_proj", "v_proj"]}},
            "train.lora.target_modules: all-linear -> ['q_proj', 'v_proj'], train.lora.use_dora: false -> true",
        ),
        ({"method": "qlora", "lora": {**LORA, "alpha": 16}}, "train.method: lora -> qlora, train.lora.alpha: 8 -> 16"),
        ({"method": "full"}, "train.method: lora -> full"),
    ],
    ids=["rank", "targets and kind", "method and adapter", "no adapter"],
)
def test_each_parameter_of_another_adapter_is_named(
    paths: TrainingPaths, settings: TrainingSettings, changes: dict[str, Any], named: str
) -> None:
    lora = vary(settings, method="lora", lora=LORA, max_steps=1, save_every_steps=1)
    run_training(paths, lora)
    with pytest.raises(UserError) as caught:
        run_training(paths, vary(lora, resume=True, **changes))
    [told] = [problem for problem in caught.value.problems if problem.startswith("  - ")]
    assert told == f"  - another method or adapter: {named}"


def test_an_identity_written_otherwise_is_shown_as_it_stands(stopped_at_2: Stopped) -> None:
    paths, settings = stopped_at_2
    [marker] = paths.checkpoints.glob(f"run-*/checkpoint-2/{checkpoints.MARKER}")
    facts = json.loads(marker.read_text())
    facts["identity"] |= {"method": "full of a later version", "effective_batch": "4 rows each"}
    marker.write_text(json.dumps(facts))
    with pytest.raises(UserError) as caught:
        run_training(paths, vary(settings, resume=True))
    assert [problem for problem in caught.value.problems if problem.startswith("  - ")] == [
        "  - another effective batch: the checkpoint has '4 rows each', this run '4 rows'",
        "  - another method or adapter: the checkpoint has 'full of a later version', this run 'full'",
    ]


@pytest.mark.parametrize(
    ("began", "now", "told"),
    [
        (None, ["layers.0"], "null -> ['layers.0']"),
        (["layers.0", "embed_tokens"], None, "['layers.0', 'embed_tokens'] -> null"),
        (["layers.0"], ["layers.1"], "['layers.0'] -> ['layers.1']"),
    ],
    ids=["more", "fewer", "as many others"],
)
def test_other_frozen_parts_are_refused(
    paths: TrainingPaths, settings: TrainingSettings, *, began: list[str] | None, now: list[str] | None, told: str
) -> None:
    run_training(paths, vary(settings, freeze=began, max_steps=1, save_every_steps=1))
    with pytest.raises(UserError) as caught:
        run_training(paths, vary(settings, freeze=now, max_steps=2, resume=True))
    assert f"  - other frozen parts: train.freeze: {told}" in caught.value.problems


def test_frozen_parts_in_another_order_go_on(paths: TrainingPaths, settings: TrainingSettings) -> None:
    run_training(paths, vary(settings, freeze=["layers.0", "embed_tokens"], max_steps=1, save_every_steps=1))
    resumed = run_training(paths, vary(settings, freeze=["embed_tokens", "layers.0"], max_steps=2, resume=True))
    assert len(resumed.steps) == 2


def test_other_frozen_parts_than_an_earlier_version_had_are_no_damage(
    paths: TrainingPaths, settings: TrainingSettings
) -> None:
    run_training(paths, vary(settings, freeze=["layers.0"], max_steps=1, save_every_steps=1))
    [marker] = paths.checkpoints.glob(f"run-*/checkpoint-1/{checkpoints.MARKER}")
    facts = json.loads(marker.read_text())
    del facts["freeze"]  # which earlier versions did not write
    marker.write_text(json.dumps(facts))
    with pytest.raises(UserError, match=r"optimizer\.pt is the state of other weights .*\n?.*Set train\.freeze back"):
        run_training(paths, vary(settings, max_steps=2, resume=True))
    assert len(run_training(paths, vary(settings, freeze=["layers.0"], max_steps=2, resume=True)).steps) == 2


def _group(checkpoint: Path) -> dict[str, Any]:
    """Return the settings of the first group in a stored optimizer."""
    stored = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)
    group: dict[str, Any] = stored["param_groups"][0]
    return group


def _with_optimizer(settings: TrainingSettings, **changes: Any) -> TrainingSettings:
    return vary(settings, trainer={**settings.train.trainer, **changes}, save_every_steps=1)


def test_settings_of_the_optimizer_hold_from_the_resume_on(paths: TrainingPaths, settings: TrainingSettings) -> None:
    """A warning and MLflow's tags say that they have changed, so they must."""
    first = _with_optimizer(settings, optim="sgd", optim_args="momentum=0.1", weight_decay=0.0)
    run_training(paths, vary(first, max_steps=2))
    stored = checkpoints.find_latest(paths.checkpoints)
    assert stored is not None
    assert (_group(stored.path)["momentum"], _group(stored.path)["weight_decay"]) == (0.1, 0.0)
    other = _with_optimizer(settings, optim="sgd", optim_args="momentum=0.9", weight_decay=0.5)
    resumed = run_training(paths, vary(other, max_steps=4, resume=True))
    stored = checkpoints.find_latest(paths.checkpoints)
    assert stored is not None and stored.step == 4
    assert (_group(stored.path)["momentum"], _group(stored.path)["weight_decay"]) == (0.9, 0.5)
    assert len(resumed.steps) == 4


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("momentum=0.9", "momentum, .* momentum=0.9 now"),
        ("centered=true", "mean of the gradients, .* centered=True now"),
    ],
)
def test_a_state_that_a_run_began_without_is_refused(
    paths: TrainingPaths, settings: TrainingSettings, asked: str, told: str
) -> None:
    run_training(paths, vary(_with_optimizer(settings, optim="rmsprop"), max_steps=2))
    other = _with_optimizer(settings, optim="rmsprop", optim_args=asked)
    with pytest.raises(UserError, match=rf"optimizer\.pt has no {told}"):
        run_training(paths, vary(other, max_steps=4, resume=True))


def test_a_state_that_is_asked_for_no_more_is_left_out(paths: TrainingPaths, settings: TrainingSettings) -> None:
    began = _with_optimizer(settings, optim="rmsprop", optim_args="momentum=0.5,centered=true")
    run_training(paths, vary(began, max_steps=2))
    run_training(paths, vary(_with_optimizer(settings, optim="rmsprop"), max_steps=4, resume=True))
    stored = checkpoints.find_latest(paths.checkpoints)
    assert stored is not None and stored.step == 4
    assert (_group(stored.path)["momentum"], _group(stored.path)["centered"]) == (0, False)


@pytest.mark.parametrize(("began", "now"), [("adamw_torch", "adamw_torch_fused"), ("adamw_torch_fused", "adamw_torch")])
def test_another_kernel_of_the_same_optimizer_goes_on(
    paths: TrainingPaths, settings: TrainingSettings, tmp_path: Path, began: str, now: str
) -> None:
    unbroken = run_training(
        TrainingPaths(paths.tokens, tmp_path / "unbroken"), vary(_with_optimizer(settings, optim=began), max_steps=4)
    )
    run_training(paths, vary(_with_optimizer(settings, optim=began), max_steps=2))
    resumed = run_training(paths, vary(_with_optimizer(settings, optim=now), max_steps=4, resume=True))
    losses = [row["loss_nats_per_token"] for row in unbroken.steps]
    assert [row["loss_nats_per_token"] for row in resumed.steps] == pytest.approx(losses, rel=SAME_LOSS)
    stored = checkpoints.find_latest(paths.checkpoints)
    assert stored is not None and stored.step == 4
    assert bool(_group(stored.path)["fused"]) == (now == "adamw_torch_fused")


def test_the_checkpoint_of_an_older_run_is_explained(stopped_at_2: Stopped, caplog: pytest.LogCaptureFixture) -> None:
    paths, settings = stopped_at_2
    newest = checkpoints.new_run_folder(paths.checkpoints)  # a later run that ended before its first checkpoint
    with pytest.raises(UserError, match="tokens-2") as caught:
        run_training(paths, vary(settings, tokens_key="tokens-2", resume=True))
    latest = checkpoints.find_latest(paths.checkpoints)
    assert latest is not None
    assert str(latest.path) in str(caught.value)
    assert newest not in latest.path.parents
    caplog.set_level("INFO", logger="lm_tuning")
    run_training(paths, vary(settings, resume=True))
    assert f"Going on from {latest.path}, step 2 of 8" in caplog.text


@pytest.mark.parametrize(("max_steps", "warmup", "steps"), [(1, 0.1, 1), (3, 10, 10), (4, 0.9, 4)])
def test_a_warmup_that_never_ends_is_refused_with_both_numbers(
    paths: TrainingPaths, settings: TrainingSettings, max_steps: int, warmup: float, steps: int
) -> None:
    trainer = {"lr_scheduler_type": "linear", "warmup_steps": warmup}
    told = rf"train\.trainer\.warmup_steps = {warmup} .*\b{steps} steps?, and train\.max_steps = {max_steps}: .* never"
    with pytest.raises(UserError, match=told):
        run_training(paths, vary(settings, max_steps=max_steps, trainer=trainer))
    assert not list(paths.checkpoints.glob("run-*"))


@pytest.mark.parametrize(("rows", "warmup", "steps", "total"), [(20, 0.1, 1, 1), (7, 10, 10, 3), (5, 0.9, 4, 4)])
def test_a_warmup_as_long_as_the_epochs_is_refused_with_both_numbers(
    paths: TrainingPaths, settings: TrainingSettings, *, rows: int, warmup: float, steps: int, total: int
) -> None:
    trainer = {"lr_scheduler_type": "linear", "warmup_steps": warmup}
    epochs = vary(settings, max_steps=None, num_epochs=1, effective_batch_rows=rows, trainer=trainer)
    with pytest.raises(UserError, match=rf"warm-?up.*\b{steps} warm-up steps?, but the run has {total} step"):
        run_training(paths, epochs)
    assert not list(paths.checkpoints.glob("run-*"))


@pytest.mark.parametrize(("max_steps", "warmup"), [(2, 1), (6, 5), (6, 0.1)])
@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant_with_warmup"])
def test_every_warmup_that_is_accepted_reaches_its_peak(
    paths: TrainingPaths, settings: TrainingSettings, max_steps: int, warmup: float, schedule: str
) -> None:
    trainer = {"lr_scheduler_type": schedule, "warmup_steps": warmup}
    result = run_training(paths, vary(settings, max_steps=max_steps, trainer=trainer))
    assert max(row["learning_rate"] for row in result.steps) == pytest.approx(settings.train.learning_rate)
    before, after = (
        load_file(folder / "model.safetensors") for folder in (Path(settings.base["name_or_path"]), result.model_folder)
    )
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
