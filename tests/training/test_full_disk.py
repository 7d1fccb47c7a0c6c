"""A disk that is full while a training writes: said by its name, nothing half written stays, and the run goes on."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lm_tuning.errors import UserError
from lm_tuning.training.checkpoints import format as checkpoints
from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training
from lm_tuning.training.trainer import StepPlanTrainer
from tests.support.settings import vary
from tests.support.small_disk import mounted


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small", "1m") as folder:
        yield folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def only_run(checkpoints_folder: Path) -> Path:
    [run] = checkpoints_folder.glob("run-*")
    return run


def fill(folder: Path, *, leave: int) -> Path:
    """Fill a disk up to a number of bytes."""
    path = folder / "somebody_elses.bin"
    path.write_bytes(b"x" * (shutil.disk_usage(folder).free - leave))
    return path


def test_a_full_disk_keeps_the_last_checkpoint_and_a_resume_goes_on(
    paths: TrainingPaths, settings: TrainingSettings, small_disk: Path, tmp_path: Path
) -> None:
    settings = vary(settings, save_every_steps=2, keep_checkpoints=1)
    unbroken = run_training(TrainingPaths(paths.tokens, tmp_path / "unbroken"), settings)
    paths = TrainingPaths(paths.tokens, small_disk / "checkpoints")
    with pytest.raises(UserError) as error:  # the first checkpoint is kept, for the second there is no space
        run_training(paths, settings, on_checkpoint=lambda: fill(small_disk, leave=100_000))
    run = only_run(paths.checkpoints)
    assert names(run) == ["checkpoint-2"]
    [message] = error.value.problems
    size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    assert f"Could not write the checkpoint of step 4 to '{run / 'checkpoint-4'}': the disk is full." in message
    assert f"It takes about {size / 1024:.0f} KiB, and " in message
    assert f"The checkpoint of step 2 is kept in {run / 'checkpoint-2'}" in message
    assert "train.resume=true" in message
    free = shutil.disk_usage(small_disk).free
    assert f"and {free / 1024:.0f} KiB is free there" in message
    assert free >= 90_000
    (small_disk / "somebody_elses.bin").unlink()
    resumed = run_training(paths, vary(settings, resume=True))
    assert [row["loss_nats_per_token"] for row in resumed.steps] == [
        row["loss_nats_per_token"] for row in unbroken.steps
    ]


@pytest.mark.parametrize("free", [0, 20_000, 60_000, 130_000])
def test_whatever_file_fills_the_disk_the_first_checkpoint_says_what_it_takes(
    paths: TrainingPaths, settings: TrainingSettings, small_disk: Path, free: int
) -> None:
    """Weights, optimizer and small files are written by different libraries, each with an error of its own."""
    paths = TrainingPaths(paths.tokens, small_disk / "checkpoints")
    with pytest.raises(UserError, match=r"checkpoint of step 2 .*the disk is full.*takes about \d+ KiB") as error:
        run_training(
            paths,
            vary(settings, save_every_steps=2),
            on_progress=lambda what, done, *_: fill(small_disk, leave=free) if (what, done) == ("Training", 1) else 0,
        )
    assert names(only_run(paths.checkpoints)) == []
    assert "no complete checkpoint to go on from" in str(error.value)
    assert shutil.disk_usage(small_disk).free >= free - 8192  # a file that is still open would hold its space


def test_the_tuned_model_that_finds_no_space_is_made_from_the_last_checkpoint(
    paths: TrainingPaths, settings: TrainingSettings, small_disk: Path
) -> None:
    paths, settings = TrainingPaths(paths.tokens, small_disk / "checkpoints"), vary(settings, save_every_steps=6)
    with pytest.raises(UserError, match=r"the tuned model .*the disk is full.*All steps were trained.*of step 6 is"):
        run_training(paths, settings, on_checkpoint=lambda: fill(small_disk, leave=30_000))
    assert names(only_run(paths.checkpoints)) == ["checkpoint-6"]
    (small_disk / "somebody_elses.bin").unlink()
    done = run_training(paths, vary(settings, resume=True))
    assert (done.model_folder / "model.safetensors").is_file()


def test_a_disk_that_takes_no_files_any_more_is_named(
    paths: TrainingPaths, settings: TrainingSettings, small_disk: Path
) -> None:
    def turn_read_only() -> None:
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)

    paths = TrainingPaths(paths.tokens, small_disk / "checkpoints")
    with pytest.raises(UserError, match=r"of step 4 .*: the file system is read-only\. .*of step 2 is kept"):
        run_training(paths, vary(settings, save_every_steps=2), on_checkpoint=turn_read_only)


SIZE_LIMITED = """
import pickle, resource, sys
from lm_tuning.errors import UserError
from lm_tuning.training.run import run_training
paths, settings = pickle.loads(open(sys.argv[1], "rb").read())
if __name__ == "__main__":
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
    try:
        run_training(paths, settings, on_checkpoint=limit)
    except UserError as error:
        print(error)
        sys.exit(2)
"""


def test_a_writer_that_hides_the_system_s_reason_is_seen_through(
    paths: TrainingPaths, settings: TrainingSettings, tmp_path: Path
) -> None:
    """PyTorch says ``unexpected pos 98304 vs 98196``, whatever cuts its file short."""
    given = tmp_path / "given.pickle"
    given.write_bytes(pickle.dumps((paths, vary(settings, save_every_steps=2))))
    command = [sys.executable, "-c", SIZE_LIMITED, str(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "checkpoint of step 4" in done.stdout
    assert "the file would pass the size limit. Raise the limit (ulimit -f)" in done.stdout
    assert names(only_run(paths.checkpoints)) == ["checkpoint-2"]


def test_an_error_that_is_not_the_disk_s_leaves_nothing_half_written_either(
    paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(StepPlanTrainer, "_save_rng_state", fail)
    with pytest.raises(RuntimeError, match="something else"):
        run_training(paths, vary(settings, save_every_steps=2))
    assert names(only_run(paths.checkpoints)) == []
    assert checkpoints.find_latest(paths.checkpoints) is None
