"""A resumed run is the unbroken one, bit by bit; what would make it another one is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lm_tuning.text.store.table import TokenTableWriter
from lm_tuning.training.checkpoints import format as checkpoints
from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training
from lm_tuning.training.trainer import StepPlanTrainer
from tests.recipes.tiny_models import save_model
from tests.support.settings import vary
from tests.support.tiny import ids, save_tiny_model
from tests.training.conftest import WORDS

LORA: dict[str, Any] = {"r": 4, "alpha": 8, "dropout": 0.3, "target_modules": "all-linear"}
LABELS = {"animal": 0, "number": 1, "other": 2}


class PowerFailure(BaseException):
    """What a test ends a training with; nothing between may catch it."""


def write_labelled(folder: Path, split: str, num_rows: int, *, seed: int = 0) -> None:
    """Write texts of different lengths with a class."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    with TokenTableWriter(folder / f"{split}.arrow") as writer:
        for row_id in range(1, num_rows + 1):
            text = "so " * int(random.integers(0, 5)) + WORDS[int(random.integers(len(WORDS)))]
            writer.append(row_id, ids(text), [], label=int(random.integers(len(LABELS))))


def write_pairs(folder: Path, split: str, num_rows: int, *, seed: int = 0) -> None:
    """Write sources of different lengths, each followed by its target."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    with TokenTableWriter(folder / f"{split}.arrow") as writer:
        for row_id in range(1, num_rows + 1):
            word = WORDS[int(random.integers(len(WORDS)))]
            source = [*ids("say " * int(random.integers(1, 4)) + word), 1]
            target = [*ids(word[::-1]), 1]
            writer.append(row_id, [*source, *target], [(len(source), len(source) + len(target))])


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Torch as ``environment.reproducibility: deterministic`` leaves it."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def dropping_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that drops attention weights while training."""
    folder = save_tiny_model(tmp_path_factory.mktemp("model") / "dropping")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.2}))
    return folder


@pytest.fixture
def dropping_run(long_run: TrainingSettings, dropping_model: Path) -> TrainingSettings:
    return vary(long_run, base={**long_run.base, "name_or_path": str(dropping_model)})


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers are wide enough for blocks of 64 weights."""
    return save_model(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture(scope="module")
def encoder_decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "bart", "bart")


@pytest.fixture
def long_run(settings: TrainingSettings) -> TrainingSettings:
    """Nine steps over two epochs and a bit, several micro-batches per step, loaded by two processes."""
    return vary(
        settings,
        max_steps=9,
        micro_batch_tokens=60,
        num_loader_workers=2,
        save_every_steps=2,
        eval_every_steps=3,
        health={"on_mismatch": "warn"},
        trainer={"lr_scheduler_type": "cosine", "warmup_steps": 2},
    )


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        f"{path.name}:{name}": value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()
    }


def assert_same_weights(first: Path, second: Path) -> None:
    one, two = weights_of(first), weights_of(second)
    assert one
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def break_at(
    monkeypatch: pytest.MonkeyPatch, step: int, seen: list[list[int]]
) -> Callable[[TrainingPaths, TrainingSettings], None]:
    """Return a training that fails in the middle of a step, counted from 1, noting the rows of every step."""
    train = StepPlanTrainer.training_step

    def training_step(self: StepPlanTrainer, model: Any, inputs: Any, count: Any = None) -> torch.Tensor:
        seen.append(inputs.row_ids)
        result = train(self, model, inputs, count)
        if inputs.step + 1 == step:
            raise PowerFailure
        return result

    def run(paths: TrainingPaths, settings: TrainingSettings) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(StepPlanTrainer, "training_step", training_step)
            with pytest.raises(PowerFailure):
                run_training(paths, settings)

    return run


CheckResume = Callable[[Path, TrainingSettings, int], Any]


@pytest.fixture
def check_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckResume:
    """Compare a run that fails at a step and is resumed with an unbroken one; return the latter's result."""
    return partial(compare_runs, tmp_path, monkeypatch)


def compare_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tokens: Path, settings: TrainingSettings, fails_at: int
) -> Any:
    unbroken = run_training(TrainingPaths(tokens, folder / "unbroken"), settings)
    paths = TrainingPaths(tokens, folder / "broken")
    seen: list[list[int]] = []
    break_at(monkeypatch, fails_at, seen)(paths, settings)
    latest = checkpoints.find_latest(paths.checkpoints)
    assert latest is not None
    torch.manual_seed(999)  # whatever happened in between
    resumed = run_training(paths, vary(settings, resume=True))
    assert resumed.health["facts"]["resumed_from_step"] == latest.step == (fails_at - 1) // 2 * 2
    assert resumed.steps == unbroken.steps
    assert [{**row, "seconds": 0} for row in resumed.evaluations] == [
        {**row, "seconds": 0} for row in unbroken.evaluations
    ]
    for name in ("num_rows", "num_tokens", "num_micro_batches"):
        assert [row[name] for row in resumed.efficiency] == [row[name] for row in unbroken.efficiency]
    assert max(row["num_micro_batches"] for row in unbroken.efficiency) > 1
    assert_same_weights(resumed.model_folder, unbroken.model_folder)
    return unbroken


@pytest.mark.parametrize(
    ("batching", "fails_at"),
    [
        pytest.param("padded", 3, id="padded, in the first epoch"),
        pytest.param("packed", 8, id="packed, in the second epoch"),
        pytest.param("packed", 3, id="packed, in the first epoch", marks=pytest.mark.slow),
        pytest.param("padded", 8, id="padded, in the second epoch", marks=pytest.mark.slow),
    ],
)
def test_a_language_model_goes_on_bit_by_bit(
    tokens_folder: Path,
    dropping_run: TrainingSettings,
    check_resume: CheckResume,
    batching: Any,
    fails_at: int,
) -> None:
    check_resume(tokens_folder, vary(dropping_run, batching=batching), fails_at)


@pytest.mark.parametrize(
    "lora",
    [
        pytest.param(LORA, id="dropout"),
        pytest.param({**LORA, "init": "pissa"}, id="pissa"),
        pytest.param({**LORA, "use_dora": True}, id="dora", marks=pytest.mark.slow),
        pytest.param({**LORA, "init": "olora", "use_rslora": True}, id="olora", marks=pytest.mark.slow),
    ],
)
def test_an_adapter_goes_on_bit_by_bit(
    tokens_folder: Path, long_run: TrainingSettings, check_resume: CheckResume, lora: dict[str, Any]
) -> None:
    settings = vary(long_run, method="lora", lora=lora, neftune_noise_alpha=5.0, label_smoothing=0.1)
    check_resume(tokens_folder, settings, 8)


def test_an_adapter_beside_4_bit_weights_goes_on_bit_by_bit(
    tokens_folder: Path, wide_model: Path, long_run: TrainingSettings, check_resume: CheckResume
) -> None:
    settings = vary(
        long_run,
        base={**long_run.base, "name_or_path": str(wide_model)},
        method="qlora",
        lora=LORA,
        qlora={"bits": 4, "quant_type": "nf4", "double_quant": True},
        gradient_checkpointing=True,
    )
    check_resume(tokens_folder, settings, 8)


@pytest.mark.parametrize(("method", "batching"), [("lora", "padded"), ("full", "packed")])
def test_a_classifier_goes_on_bit_by_bit(
    dropping_run: TrainingSettings, tmp_path: Path, check_resume: CheckResume, method: Any, batching: Any
) -> None:
    for seed, (split, count) in enumerate((("train", 20), ("validation", 6), ("test", 0))):
        write_labelled(tmp_path / "tokens", split, count, seed=seed)
    settings = vary(
        dropping_run,
        task="sequence_classification",
        label_map=LABELS,
        method=method,
        lora=LORA if method == "lora" else {},
        batching=batching,
        class_weights="balanced",
        best_metric="macro_f1",
        micro_batch_tokens=40,
    )
    unbroken = check_resume(tmp_path / "tokens", settings, 8)
    names = weights_of(unbroken.model_folder)
    assert any(name.endswith("score.weight") for name in names), sorted(names)


def test_another_best_metric_finds_the_best_of_the_steps_before(
    dropping_run: TrainingSettings, tmp_path: Path, paths: TrainingPaths
) -> None:
    for seed, (split, count) in enumerate((("train", 20), ("validation", 6), ("test", 0))):
        write_labelled(tmp_path / "tokens", split, count, seed=seed)
    paths = TrainingPaths(tmp_path / "tokens", paths.checkpoints)
    settings = vary(
        dropping_run,
        task="sequence_classification",
        label_map=LABELS,
        best_metric="macro_f1",
        load_best=True,
        keep_checkpoints=10,
        eval_every_steps=2,
        save_every_steps=2,
        learning_rate=1e-4,
        max_steps=6,
        num_epochs=None,
        micro_batch_tokens=40,
        trainer={"lr_scheduler_type": "constant"},
    )
    run_training(paths, settings)
    # A rate that spoils the model, so that the best loss is one from before.
    spoilt = vary(settings, learning_rate=5.0, max_steps=8, best_metric="loss", early_stopping_evals=4, resume=True)
    resumed = run_training(paths, spoilt)
    losses = {row["step"]: row["validation_nats_per_row"] for row in resumed.evaluations if row["step"]}
    assert resumed.summary["best_step"] == min(losses, key=losses.__getitem__) < 8


def test_an_encoder_decoder_goes_on_bit_by_bit(
    encoder_decoder: Path, long_run: TrainingSettings, tmp_path: Path, check_resume: CheckResume
) -> None:
    for seed, (split, count) in enumerate((("train", 20), ("validation", 6), ("test", 0))):
        write_pairs(tmp_path / "tokens", split, count, seed=seed)
    settings = vary(
        long_run,
        task="seq2seq_lm",
        base={**long_run.base, "name_or_path": str(encoder_decoder)},
        learning_rate=1e-3,
        label_smoothing=0.1,
    )
    check_resume(tmp_path / "tokens", settings, 8)


def test_a_resumed_run_sees_the_rows_that_were_left(
    paths: TrainingPaths, long_run: TrainingSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: list[list[int]] = []
    break_at(monkeypatch, 9, whole)(TrainingPaths(paths.tokens, tmp_path / "whole"), long_run)
    seen: list[list[int]] = []
    break_at(monkeypatch, 4, seen)(paths, long_run)
    break_at(monkeypatch, 7, seen)(paths, vary(long_run, resume=True))
    break_at(monkeypatch, 9, seen)(paths, vary(long_run, resume=True))
    # Steps 1 to 4; again from the checkpoint of step 2 to 7; again from that of step 6.
    assert seen == [*whole[:4], *whole[2:7], *whole[6:9]]
    assert sorted(row for rows in whole[:4] for row in rows) == list(range(1, 21))


@pytest.mark.parametrize("moment", ["weights", "optimizer", "random state", "marker", "rename"])
def test_a_half_written_checkpoint_is_passed_over(
    paths: TrainingPaths, settings: TrainingSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    saving = vary(settings, save_every_steps=2)
    unbroken = run_training(TrainingPaths(paths.tokens, tmp_path / "unbroken"), saving)
    owner, name = {
        "weights": (StepPlanTrainer, "save_model"),
        "optimizer": (StepPlanTrainer, "_save_optimizer_and_scheduler"),
        "random state": (StepPlanTrainer, "_save_rng_state"),
        "marker": (checkpoints, "sync_folder"),
        "rename": (Path, "rename"),
    }[moment]
    real = getattr(owner, name)

    def fail_at_step_4(*arguments: Any, **options: Any) -> Any:
        if any(".writing-4" in str(value) for value in [*arguments, *options.values()]):
            raise PowerFailure
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail_at_step_4)
        with pytest.raises(PowerFailure):
            run_training(paths, saving)
    (run,) = paths.checkpoints.glob("run-*")
    assert not (run / ".writing-4").exists(), "what fails takes its half-written folder away"
    # A kill or a power failure has no time for that, and leaves one.
    (run / ".writing-4").mkdir()
    (run / ".writing-4" / "model.safetensors").write_bytes(b"half")
    resumed = run_training(paths, vary(saving, resume=True))
    assert resumed.health["facts"]["resumed_from_step"] == 2
    assert not list(run.glob(".writing-*"))
    assert_same_weights(resumed.model_folder, unbroken.model_folder)


def test_a_half_deleted_checkpoint_is_passed_over(
    paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = vary(settings, save_every_steps=2, keep_checkpoints=1)
    remove = shutil.rmtree

    def fail_at_step_2(path: Path, *arguments: Any, **options: Any) -> None:
        if Path(path).name == "checkpoint-2":
            next(Path(path).glob("*.safetensors")).unlink()
            raise PowerFailure
        remove(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fail_at_step_2)
        with pytest.raises(PowerFailure):
            run_training(paths, saving)
    (run,) = paths.checkpoints.glob("run-*")
    assert (run / "checkpoint-2").is_dir()
    assert [checkpoint.step for checkpoint in checkpoints.list_complete(run)] == [4]
    resumed = run_training(paths, vary(saving, resume=True))
    assert resumed.health["facts"]["resumed_from_step"] == 4
    assert [checkpoint.step for checkpoint in checkpoints.list_complete(run)] == [6]
