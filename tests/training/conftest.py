"""Tiny tokenized splits and a model folder to train on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lm_tuning.text.store.table import TokenTableWriter
from lm_tuning.training.run import TrainingPaths, TrainingSettings
from tests.support.settings import make_settings
from tests.support.tiny import ASSISTANT, END, USER, ids, save_tiny_model

WORDS = ["cat", "dog", "bird", "fish", "a longer animal", "two of them"]


def write_rows(folder: Path, split: str, num_rows: int, *, seed: int = 0, num_sources: int = 1) -> None:
    """Write rows of one question and one answer, the answer and its EOS token supervised; sources take turns."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    with TokenTableWriter(folder / f"{split}.arrow") as writer:
        for row_id in range(1, num_rows + 1):
            word = WORDS[int(random.integers(len(WORDS)))]
            prompt = [USER, *ids("say " * int(random.integers(1, 4)) + word), END, ASSISTANT]
            answer = [*ids(word[::-1]), END]
            span = (len(prompt), len(prompt) + len(answer))
            writer.append(row_id, [*prompt, *answer], [span], source=(row_id - 1) % num_sources)


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with the character tokenizer."""
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def tokens_folder(tmp_path: Path) -> Path:
    """Twenty training rows and six validation rows."""
    folder = tmp_path / "tokens"
    write_rows(folder, "train", 20)
    write_rows(folder, "validation", 6, seed=1)
    write_rows(folder, "test", 6, seed=2)
    return folder


@pytest.fixture
def paths(tokens_folder: Path, tmp_path: Path) -> TrainingPaths:
    """Where the tiny training reads and writes."""
    return TrainingPaths(tokens=tokens_folder, checkpoints=tmp_path / "checkpoints")


@pytest.fixture
def settings(tiny_model_folder: Path) -> TrainingSettings:
    """A full fine-tuning of six steps on a CPU in float32."""
    return make_settings(tiny_model_folder, learning_rate=1e-2, effective_batch_rows=6, max_steps=6)
