"""A registry of planted faults: each plants one in a training that is otherwise sound, and names the expected code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_tuning.errors import UserError
from lm_tuning.text.store.table import TokenTableWriter
from lm_tuning.training import run as run_module
from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training
from lm_tuning.training.setup.model import ReadyModel
from tests.support.settings import vary
from tests.support.tiny import ASSISTANT, END, USER, ids

Row = tuple[Sequence[int], Sequence[tuple[int, int]]]


@dataclass
class World:
    """A tiny training into which a fault is planted.

    Attributes:
        paths: where it reads and writes.
        settings: of it; a fault may replace them.
        patch: undone after the test.
        folder: of the test.
        reports: every health report that was handed out, the last one at the end.
        rows_seen: forward passes of the model.
    """

    paths: TrainingPaths
    settings: TrainingSettings
    patch: pytest.MonkeyPatch
    folder: Path
    reports: list[dict[str, Any]] = field(default_factory=list)
    rows_seen: int = 0

    def set(self, **changes: Any) -> None:
        """Change settings."""
        self.settings = vary(self.settings, **changes)

    def write_rows(self, rows: Sequence[Row], *, labels: Sequence[int] | None = None, split: str = "train") -> None:
        """Replace the rows of a split."""
        with TokenTableWriter(self.paths.tokens / f"{split}.arrow") as writer:
            for index, (row, spans) in enumerate(rows):
                writer.append(index + 1, list(row), list(spans), label=-1 if labels is None else labels[index])

    def copy_model(self) -> Path:
        """Copy the model folder, to be changed."""
        copy = self.folder / "changed_model"
        shutil.copytree(self.settings.base["name_or_path"], copy)
        self.set(base={**self.settings.base, "name_or_path": str(copy)})
        return copy

    def change_config(self, **changes: Any) -> None:
        """Change values of the model's ``config.json``."""
        path = self.copy_model() / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def change_weights(self, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        """Change the stored weights, each by its name."""
        from safetensors.torch import load_file, save_file

        path = self.copy_model() / "model.safetensors"
        weights = {name: change(name, tensor).contiguous() for name, tensor in load_file(path).items()}
        save_file(weights, path, metadata={"format": "pt"})

    def change_model(self, change: Callable[[Any], object]) -> None:
        """Change the model after it was loaded and set up."""
        sound = run_module.set_up_model

        def set_up(settings: TrainingSettings) -> ReadyModel:
            ready = sound(settings)
            change(ready.model)
            return ready

        self.patch.setattr(run_module, "set_up_model", set_up)

    def run(self) -> UserError | None:
        """Train; return what refused or stopped it."""
        from transformers import LlamaModel

        forward = LlamaModel.forward

        def count(model: Any, *arguments: Any, **options: Any) -> Any:
            self.rows_seen += 1
            return forward(model, *arguments, **options)

        count.__wrapped__ = forward  # type: ignore[attr-defined] - signatures are read off it
        self.patch.setattr(LlamaModel, "forward", count)
        try:
            run_training(self.paths, self.settings, on_health=self.reports.append)
        except UserError as error:
            return error
        return None


Plant = Callable[[World], object]


@dataclass(frozen=True)
class Planted:
    """A fault and the finding that is expected.

    Attributes:
        code: of the finding.
        plant: plants it.
        name: of the variant; empty for the only one.
        severity: of the finding; ``None`` takes the code's.
        before_any_row: whether it must be found before the model sees any row.
        alone: whether no other finding above a note may stand beside it.
    """

    code: str
    plant: Plant
    name: str = ""
    severity: str | None = None
    before_any_row: bool = False
    alone: bool = True


class Registry(list[Planted]):
    """Planted faults, added by a decorator."""

    def __call__(self, code: str, name: str = "", **options: Any) -> Callable[[Plant], Plant]:
        """Register the function as the one that plants a fault."""

        def add(plant: Plant) -> Plant:
            self.append(Planted(code, plant, name, **options))
            return plant

        return add


def chat(question: str, answer: str, *, start: Sequence[int] = (), ends: bool = True, is_masked: bool = False) -> Row:
    """Spell a row of one question and one answer, the answer supervised."""
    prompt = [*start, USER, *ids(question), END, ASSISTANT]
    reply = [*ids(answer), *([END] if ends else [])]
    return [*prompt, *reply], [] if is_masked else [(len(prompt), len(prompt) + len(reply))]


def chats(count: int, **options: Any) -> list[Row]:
    """Spell several such rows."""
    return [chat(f"say {n}", f"{n} and {n}", **options) for n in range(count)]
