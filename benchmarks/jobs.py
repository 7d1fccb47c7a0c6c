"""The whole jobs that ``whole_job.py`` times: their recipe, their rows, and a tiny form of each for a CPU."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Setting = str | int | float | None


@dataclass(frozen=True)
class Job:
    """One job.

    Attributes:
        env: the recipe, a folder below ``conf``; ``None`` for the defaults.
        files: raw files below the data folder, which are copied into the project.
        settings: what a user would set on top of the recipe, by dotted key.
        tiny: what makes it small enough for a CPU.
    """

    env: str | None
    files: tuple[str, ...]
    settings: Mapping[str, Setting]
    tiny: Mapping[str, Setting]


_TINY = {"tokenize.max_length_tokens": 256, "train.precision": "float32", "evaluate.generation.max_new_tokens": 8}
JOBS = {
    "default": Job(
        env=None,
        files=(),
        settings={},
        tiny=_TINY
        | {"train.max_steps": 4, "train.eval_every_steps": 2, "train.save_every_steps": 2, "data.max_rows": 400,
           "evaluate.num_generate_rows": 4, "evaluate.max_loss_rows": 8},
    ),
    "banking77": Job(
        env="banking77",
        files=("banking77/train.csv", "banking77/test.csv"),
        settings={"train.num_epochs": 1},
        tiny=_TINY | {"train.eval_every_steps": 4, "train.save_every_steps": 4},
    ),
    "gsm8k": Job(
        env="gsm8k",
        files=("gsm8k/train.jsonl",),
        settings={
            "train.effective_batch_tokens": 16384,
            "train.max_steps": 300,
            "evaluate.num_generate_rows": 256,
            "evaluate.generation.max_new_tokens": 200,
        },
        tiny=_TINY
        | {"train.effective_batch_tokens": 512, "train.max_steps": 4, "train.eval_every_steps": 2,
           "train.save_every_steps": 2, "evaluate.num_generate_rows": 6, "evaluate.max_loss_rows": 8},
    ),
}  # fmt: skip


def settings_of(job: Job, *, model: Path, is_tiny: bool, more: str) -> dict[str, Setting]:
    """Return all that is set on top of the recipe, by dotted key.

    Args:
        job: which.
        model: folder of the base model.
        is_tiny: whether the tiny form is wanted.
        more: further settings as ``--params`` takes them; they count last.
    """
    added = dict(pair.split("=", 1) for pair in more.split(",") if pair)
    return {"model.name_or_path": str(model), **job.settings, **(job.tiny if is_tiny else {}), **added}


def copy_rows(job: Job, project: Path, data: Path | None) -> None:
    """Write the raw files where the recipe reads them.

    Args:
        job: which.
        project: the project's folder.
        data: folder of the real sets; ``None`` writes a few rows of the same kind.
    """
    for name in job.files:
        target = project / "data/01_raw" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if data is None:
            _WRITERS[target.suffix](target)
        else:
            shutil.copyfile(data / name, target)


def _write_questions(path: Path) -> None:
    """Write sums with worked answers, as JSON lines."""
    draw = random.Random(0)  # noqa: S311 - no secret
    lines = []
    for _ in range(120):
        first, second = draw.randrange(100), draw.randrange(100)
        total = first + second
        lines.append({"question": f"{first} and {second}?", "answer": f"{first}+{second}={total}. #### {total}"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _write_intents(path: Path) -> None:
    """Write short texts of three classes, as CSV."""
    draw = random.Random(path.name)  # noqa: S311 - no secret
    rows = [f"please {word} item {draw.randrange(10**6)},{word}" for word in ("open", "close", "check") * 70]
    path.write_text("\n".join(["text,category", *rows]) + "\n", encoding="utf-8")


_WRITERS = {".jsonl": _write_questions, ".csv": _write_intents}


def save_tiny_model(folder: Path) -> None:
    """Write a random model of two layers whose tokenizer has a token per character.

    Args:
        folder: where to; it is made.
    """
    from tiny_job import save_tiny_model as save

    folder.mkdir(parents=True, exist_ok=True)
    save(folder)


def read_parameters(project: Path, env: str | None, settings: Mapping[str, Setting]) -> Any:
    """Return the parameters that a run with these settings has.

    Args:
        project: its folder.
        env: the recipe.
        settings: by dotted key.

    Returns:
        An instance of ``lm_tuning.parameters.groups.Parameters``.
    """
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="register_new_resolver")  # Kedro's own affair
        from kedro.config import OmegaConfigLoader
    from omegaconf import OmegaConf

    from lm_tuning.parameters.groups import Parameters

    lines = [f"{key}={'null' if value is None else value}" for key, value in settings.items()]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="register_new_resolver")
        loader = OmegaConfigLoader(
            str(project / "conf"),
            base_env="base",
            default_run_env=env or "local",
            merge_strategy={"parameters": "soft"},
        )
        stored = loader["parameters"]
    merged = OmegaConf.merge(OmegaConf.create(stored), OmegaConf.from_dotlist(lines))
    return Parameters.model_validate(OmegaConf.to_container(merged))
