"""A resume reads all of its checkpoint or none: what is damaged is named, and nothing trains on without it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lm_tuning.errors import UserError
from lm_tuning.training import run as training
from lm_tuning.training.checkpoints import format as checkpoints
from lm_tuning.training.checkpoints.resume import RestoresState
from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training
from tests.support.damage import DAMAGES, DAMAGES_OF_METHOD, MARKER, change, cut, forget_files, having
from tests.support.settings import vary

LORA: dict[str, Any] = {"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"}
Stopped = Callable[..., tuple[TrainingPaths, TrainingSettings]]


@pytest.fixture
def stopped(paths: TrainingPaths, settings: TrainingSettings) -> Stopped:
    """Return how to make a run of 2 steps, a checkpoint after each, that is to go on to step 4."""

    def make(method: str = "full", **changed: Any) -> tuple[TrainingPaths, TrainingSettings]:
        chosen = vary(settings, save_every_steps=1, max_steps=2, **changed)
        if method == "lora":
            chosen = vary(chosen, method="lora", lora=LORA)
        run_training(paths, chosen)
        return paths, vary(chosen, max_steps=4, resume=True)

    return make


def newest(paths: TrainingPaths) -> Path:
    latest = checkpoints.find_latest(paths.checkpoints)
    assert latest is not None
    return latest.path


def refuse_loading(*_: object) -> None:
    raise AssertionError("a model is loaded")


@pytest.mark.parametrize("method", ["lora", "full"])
def test_damage_is_told_before_a_model_is_loaded(
    stopped: Stopped, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str
) -> None:
    paths, settings = stopped(method)
    folder = newest(paths)
    shutil.copytree(folder, tmp_path / "kept")
    monkeypatch.setattr(training, "set_up_model", refuse_loading)
    for name, (damage, words) in {**DAMAGES, **DAMAGES_OF_METHOD[method]}.items():
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "kept", folder)
        damage(folder)
        with pytest.raises(UserError) as caught:
            run_training(paths, settings)
        told = "\n".join(caught.value.problems)
        assert f"the checkpoint {folder} cannot be used." in told, name
        assert [word for word in words if word not in told] == [], (name, told)
        assert f"is whole: {folder.with_name('checkpoint-1')}." in told, name


def test_the_checkpoint_before_a_damaged_one_leads_to_the_unbroken_run(stopped: Stopped, tmp_path: Path) -> None:
    paths, settings = stopped(trainer={"lr_scheduler_type": "constant"})
    unbroken = run_training(replace(paths, checkpoints=tmp_path / "unbroken"), vary(settings, resume=False))
    folder = newest(paths)
    (folder / "optimizer.pt").unlink()
    with pytest.raises(UserError, match=r"optimizer.pt is missing"):
        run_training(paths, settings)
    folder.rename(tmp_path / "elsewhere")
    resumed = run_training(paths, settings)
    assert resumed.health["facts"]["resumed_from_step"] == 1
    assert resumed.steps == unbroken.steps


def test_a_damaged_older_checkpoint_is_in_nobody_s_way(stopped: Stopped) -> None:
    paths, settings = stopped()
    older = newest(paths).with_name("checkpoint-1")
    (older / MARKER).write_text("{")
    resumed = run_training(paths, settings)
    assert resumed.health["facts"]["resumed_from_step"] == 2
    assert older.is_dir(), "what cannot be read is not deleted"


def test_a_later_folder_without_its_marker_is_passed_over_with_a_word(
    stopped: Stopped, caplog: pytest.LogCaptureFixture
) -> None:
    paths, settings = stopped()
    folder = newest(paths)
    (folder / MARKER).unlink()
    resumed = run_training(paths, settings)
    assert resumed.health["facts"]["resumed_from_step"] == 1
    assert f"{folder} is half written or half deleted: it has no {MARKER}, and is passed over." in caplog.text


def spoil(path: Path) -> None:
    """Change a file's first tensor or value, its size and its structure left as they are."""
    content = bytearray(path.read_bytes())
    begin = content.find(b"data.pkl") + 64  # the pickle comes first in the archive
    content[begin : begin + 32] = b"\xff" * 32
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_file_of_the_right_size_that_cannot_be_read_is_named(stopped: Stopped, name: str) -> None:
    paths, settings = stopped()
    folder = newest(paths)
    spoil(folder / name)
    with pytest.raises(UserError) as caught:
        run_training(paths, settings)
    told = "\n".join(caught.value.problems)
    assert f"The checkpoint {folder} cannot be used." in told
    assert f"  - {name} cannot be used (" in told


@pytest.mark.parametrize(("name", "state"), [("optimizer.pt", {"state": {}}), ("rng_state.pth", {"python": 3})])
def test_a_file_of_another_content_is_named(stopped: Stopped, name: str, state: dict[str, Any]) -> None:
    paths, settings = stopped()
    forget_files(newest(paths))
    torch.save(state, newest(paths) / name)
    with pytest.raises(UserError, match=rf"  - {name} cannot be used \("):
        run_training(paths, settings)


@pytest.mark.parametrize(("method", "name"), [("full", "model.safetensors"), ("lora", "adapter_model.safetensors")])
@pytest.mark.parametrize("renames", [False, True])
def test_weights_without_a_tensor_are_refused(stopped: Stopped, method: str, name: str, renames: bool) -> None:
    paths, settings = stopped(method)
    forget_files(newest(paths))
    tensors = load_file(newest(paths) / name)
    lost = max(tensors)  # not the embedding, which the head may share
    tensors = {("other" if key == lost and renames else key): value for key, value in tensors.items()}
    if not renames:
        del tensors[lost]
    save_file(tensors, newest(paths) / name, metadata={"format": "pt"})
    with pytest.raises(UserError) as caught:
        run_training(paths, settings)
    assert f"  - {name} lacks 1 tensor, first {lost}." in caught.value.problems


def test_the_state_of_another_optimizer_is_refused(stopped: Stopped) -> None:
    paths, settings = stopped()
    with pytest.raises(UserError, match=r"optimizer.pt is the state of another optimizer, without .*momentum"):
        run_training(paths, vary(settings, trainer={**settings.train.trainer, "optim": "sgd"}))


@pytest.mark.parametrize("began", ["adamw_torch", "paged_adamw_32bit"])
def test_the_state_of_an_optimizer_with_more_settings_is_refused(stopped: Stopped, began: str) -> None:
    """Lion would look its state up under other names, or take Adam's first moment for its own."""
    pytest.importorskip("bitsandbytes")
    paths, settings = stopped(trainer={"lr_scheduler_type": "constant", "optim": began})
    with pytest.raises(UserError, match=r"optimizer.pt is the state of another optimizer, with (alpha|.*fused)"):
        run_training(paths, vary(settings, trainer={**settings.train.trainer, "optim": "lion_32bit"}))


def test_an_optimizer_without_a_state_by_weight_goes_on(stopped: Stopped) -> None:
    paths, settings = stopped(trainer={"lr_scheduler_type": "constant", "optim": "sgd"})
    assert run_training(paths, settings).health["facts"]["resumed_from_step"] == 2


def test_a_gradient_scaler_that_this_precision_has_not_is_left_alone(stopped: Stopped) -> None:
    paths, settings = stopped()
    torch.save({"scale": 65536.0}, newest(paths) / "scaler.pt")
    assert run_training(paths, settings).health["facts"]["resumed_from_step"] == 2


def test_a_gradient_scaler_that_the_checkpoint_has_not_begins_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = RestoresState()
    trainer.accelerator = SimpleNamespace(scaler=torch.amp.GradScaler("cpu"))
    trainer._load_scaler(str(tmp_path))
    assert f"{tmp_path} has no scaler.pt, which only float16 writes" in caplog.text


def test_notes_that_transformers_does_not_know_are_named(stopped: Stopped) -> None:
    paths, settings = stopped()
    forget_files(newest(paths))
    change(newest(paths) / "trainer_state.json", having(from_the_future=1))
    with pytest.raises(UserError, match=r"trainer_state.json cannot be used .*from_the_future"):
        run_training(paths, settings)


def test_further_keys_of_a_later_version_do_no_harm(stopped: Stopped) -> None:
    paths, settings = stopped()
    finding = {name: "x" for name in ("code", "severity", "measured", "expected", "cause", "change", "later")}
    best = {"metric": "nats_per_token", "value": 1.0, "step": 1, "later": 1}
    change(
        newest(paths) / MARKER,
        lambda facts: {**facts, "later": 1, "best": best, "health": {**facts["health"], "findings": [finding]}},
    )
    resumed = run_training(paths, settings)
    assert [found["code"] for found in resumed.health["findings"]] == ["x"]


@pytest.fixture
def best_first(stopped: Stopped) -> tuple[TrainingPaths, TrainingSettings]:
    """A run whose best checkpoint is that of step 1, since its rate spoils the model."""
    paths, settings = stopped(load_best=True, eval_every_steps=1, learning_rate=5.0, health={"on_mismatch": "warn"})
    change(newest(paths) / MARKER, lambda facts: {**facts, "best": {**facts["best"], "value": 0.1, "step": 1}})
    return paths, settings


def test_a_damaged_best_checkpoint_is_told_before_training(best_first: tuple[TrainingPaths, TrainingSettings]) -> None:
    paths, settings = best_first
    best = newest(paths).with_name("checkpoint-1")
    cut(best / "model.safetensors")
    with pytest.raises(UserError) as caught:
        run_training(paths, settings)
    told = "\n".join(caught.value.problems)
    assert f"the checkpoint {best} cannot be used." in told
    assert "It has the best nats_per_token so far, which train.load_best ends with." in told
    assert run_training(paths, vary(settings, load_best=False)).health["facts"]["resumed_from_step"] == 2


def test_a_best_checkpoint_that_is_not_kept_gives_way(
    best_first: tuple[TrainingPaths, TrainingSettings], caplog: pytest.LogCaptureFixture
) -> None:
    paths, settings = best_first
    shutil.rmtree(newest(paths).with_name("checkpoint-1"))
    resumed = run_training(paths, settings)
    assert "The checkpoint of step 1, the best so far, is not kept: step 2 is the best of the others." in caplog.text
    assert resumed.summary["best_step"] in {2, 3, 4}
