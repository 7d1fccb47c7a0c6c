"""Every recipe of ``conf/`` trains and evaluates a tiny random model of its architecture, with its own parameters."""

from __future__ import annotations

import csv
import gc
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from kedro.config import OmegaConfigLoader
from kedro.io import DataCatalog, MemoryDataset
from kedro.runner import SequentialRunner

from lm_tuning import settings as project_settings
from lm_tuning.parameters import Parameters
from lm_tuning.parameters.loading import load_parameters
from lm_tuning.pipeline_registry import register_pipelines
from tests.recipes.tiny_models import save_model

REPOSITORY = Path(__file__).resolve().parents[2]
NO_RECIPES = {"base", "local", "smoke", "gsm8k"}
ANIMALS = ["cat", "dog", "bird", "fish", "horse", "sheep", "goat", "duck"]
KOREAN = ["고양이", "강아지", "새", "물고기", "말", "양", "염소", "오리"]
NUM_STEPS = 4


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def labelled(count: int, num_classes: int, label: str) -> list[dict[str, Any]]:
    return [{"text": f"my {ANIMALS[n % 8]} {n}?", label: f"intent_{n % num_classes:03}"} for n in range(count)]


def write_dialogues(folder: Path) -> None:
    rows = [
        {
            "ID": n,
            "section_header": "GENHX",
            "section_text": f"{ANIMALS[n % 8]} {n}",
            "dialogue": f"Doctor: a {ANIMALS[n % 8]}?\nPatient: {n} of them.",
        }
        for n in range(48)
    ]
    write_csv(folder / "train.csv", rows[:40])
    write_csv(folder / "validation.csv", rows[40:])


def write_intents(folder: Path) -> None:
    write_csv(folder / "train.csv", labelled(900, 280, "intent"))


def write_banking(folder: Path) -> None:
    write_csv(folder / "train.csv", labelled(60, 5, "category"))
    write_csv(folder / "test.csv", labelled(12, 5, "category"))


def write_chats(folder: Path) -> None:
    rows = []
    for n in range(40):
        turns = [("user", f"which animal is {n}?"), ("assistant", ANIMALS[n % 8])]
        if n % 2:
            turns += [("user", "and backwards?"), ("assistant", ANIMALS[n % 8][::-1])]
        rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    write_jsonl(folder / "first.jsonl", rows[:20])
    write_jsonl(folder / "second.jsonl", rows[20:])


def write_instructions(folder: Path) -> None:
    rows = [{"instruction": f"say {ANIMALS[n % 8]} {n}", "output": f"{n} {ANIMALS[n % 8]}"} for n in range(40)]
    write_jsonl(folder / "train.jsonl", rows)


def write_korean_instructions(folder: Path) -> None:
    rows = [
        {"instruction": f"{KOREAN[n % 8]} {n}마리를 말해 줘", "output": f"{KOREAN[n % 8]}, {n * n} 그리고 {n}"}
        for n in range(26)  # the wording around them is long in bytes
    ]
    write_jsonl(folder / "train.jsonl", rows)


def write_korean_text(folder: Path) -> None:
    write_jsonl(folder / "some.jsonl", [{"text": f"{KOREAN[n % 8]}가 {n}마리 있다."} for n in range(40)])


def write_summaries(folder: Path) -> None:
    rows = [
        {
            "document": f"오늘 {KOREAN[n % 8]} {n}마리가 들에 나왔다. 날씨는 맑았다.",
            "summary": f"{KOREAN[n % 8]} {n}마리",
        }
        for n in range(40)
    ]
    write_jsonl(folder / "train.jsonl", rows)


def write_questions(folder: Path) -> None:
    rows = [{"question": f"{ANIMALS[n % 8]} number {n}?", "answer": f"{n} {ANIMALS[n % 8]}"} for n in range(40)]
    write_jsonl(folder / "train.jsonl", rows)


@dataclass(frozen=True)
class Recipe:
    """What a recipe's run is given, and what must come out.

    Attributes:
        architecture: of the tiny model, the same as the real one's.
        write_rows: fills a folder with rows that have the columns which the recipe names.
        method: that trains it.
        paths: files below that folder by parameter.
        has_template: whether the real model's tokenizer has a chat template.
        is_placed: whether the real rows lie where the user puts them, rather than being the example.
    """

    architecture: str
    write_rows: Callable[[Path], None]
    method: str
    paths: dict[str, str] = field(default_factory=lambda: {"path": "train.jsonl"})
    has_template: bool = True
    is_placed: bool = True


RECIPES = {
    "banking77": Recipe("llama", write_banking, "lora", {"path": "train.csv", "test_path": "test.csv"}),
    "qwen3_4b_intents": Recipe("qwen3", write_intents, "lora", {"path": "train.csv"}),
    "qwen3_4b_chat": Recipe("qwen3", write_chats, "lora", {"path": "*.jsonl"}),
    "llama32_3b_dialogues": Recipe(
        "llama",
        write_dialogues,
        "qlora",
        {"path": "train.csv", "validation_path": "validation.csv"},
        has_template=False,
    ),
    "solar_10_7b": Recipe("llama", write_instructions, "qlora", has_template=False),
    "polyglot_ko_12_8b": Recipe("gpt_neox", write_korean_text, "qlora", {"path": "*.jsonl"}, has_template=False),
    "kullm": Recipe("gpt_neox", write_korean_instructions, "qlora", has_template=False),
    "kobart_summaries": Recipe("bart", write_summaries, "full", has_template=False),
    "smollm2_full": Recipe("llama", write_questions, "full", is_placed=False),
}


def make_loader(name: str, **given: Any) -> OmegaConfigLoader:
    return OmegaConfigLoader(
        conf_source=str(REPOSITORY / "conf"), env=name, runtime_params=given, **project_settings.CONFIG_LOADER_ARGS
    )


def with_small_sizes(name: str, model: Path, rows: Path) -> dict[str, Any]:
    """Return what takes the place of the recipe's model, rows, lengths and steps; all else is the recipe's."""
    recipe = RECIPES[name]
    small: dict[str, Any] = {
        "model": {"name_or_path": str(model)},
        "data": {key: str(rows / value) for key, value in recipe.paths.items()},
        "split": {"validation": 8, "test": 8},
        "train": {
            "num_epochs": None,
            "max_steps": NUM_STEPS,
            "micro_batch_tokens": "auto",
            "eval_every_steps": 2,
            "eval_max_rows": 4,
            "save_every_steps": 2,
        },
        "evaluate": {"max_new_tokens": 6, "max_loss_rows": 6},
    }
    if load_parameters(make_loader(name), REPOSITORY).evaluate.num_generate_rows:
        small["evaluate"]["num_generate_rows"] = 2
    return small


def run(name: str, folder: Path) -> Parameters:
    """Run all pipelines in the working folder, without the hooks around them."""
    recipe = RECIPES[name]
    model = save_model(folder / "model", recipe.architecture, has_template=recipe.has_template)
    recipe.write_rows(folder / "rows")
    loader = make_loader(name, **with_small_sizes(name, model, folder / "rows"))
    parameters = load_parameters(loader, REPOSITORY)
    catalog = DataCatalog.from_config(loader["catalog"])
    for key in type(parameters).model_fields:
        catalog[f"params:{key}"] = MemoryDataset(getattr(parameters, key), copy_mode="assign")
    SequentialRunner().run(register_pipelines()["__default__"], catalog)
    return parameters


def test_every_overlay_is_tried_here() -> None:
    assert {path.name for path in (REPOSITORY / "conf").iterdir() if path.is_dir()} == NO_RECIPES | set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_what_it_is_for(name: str) -> None:
    parameters = load_parameters(make_loader(name), REPOSITORY)
    text = (REPOSITORY / "conf" / name / "parameters.yml").read_text(encoding="utf-8")
    assert f"kedro run --env {name}\n" in text
    assert parameters.output == name
    assert parameters.train.method == RECIPES[name].method
    rows = parameters.data.path
    assert isinstance(rows, str)
    assert rows.startswith("data/01_raw/")
    assert RECIPES[name].is_placed == ("example" not in rows)
    assert (parameters.model.name_or_path.count("/") == 1) == (name not in {"banking77", "smollm2_full"})


@pytest.fixture
def few_objects() -> Iterator[None]:
    """Leave what is loaded already out of the searches for garbage, which take longer than a tiny model's steps."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_and_evaluates(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parameters = run(name, tmp_path)
    reports = tmp_path / "data/08_reporting" / name

    health = json.loads((reports / "health.json").read_text())
    assert [finding for finding in health["findings"] if finding["severity"] != "note"] == []
    unit = "row" if parameters.task == "sequence_classification" else "token"
    facts = health["facts"]
    assert facts["task"] == parameters.task
    due = facts[f"first_step_measured_nats_per_{unit}"]
    assert facts[f"first_step_logged_nats_per_{unit}"] == pytest.approx(due, rel=facts["first_loss_tolerance"])

    with (reports / "training_summary.csv").open(newline="") as file:
        steps = list(csv.DictReader(file))
    assert len(steps) == NUM_STEPS
    losses = [float(row[f"loss_nats_per_{unit}"]) for row in steps]
    norms = [float(row["gradient_norm"]) for row in steps]
    assert all(math.isfinite(value) and value > 0 for value in [*losses, *norms])
    assert max(float(row["learning_rate"]) for row in steps) == pytest.approx(parameters.train.learning_rate)

    tuned = tmp_path / "data/06_models" / name / "tuned_model"
    assert json.loads((tuned / "tuning.json").read_text())["method"] == parameters.train.method
    if unit == "row":
        num_classes = len(json.loads((tuned / "label_map.json").read_text()))
        assert num_classes == {"banking77": 5, "qwen3_4b_intents": 280}[name]
        assert losses[0] == pytest.approx(math.log(num_classes), rel=0.03)
    is_adapter = parameters.train.method != "full"
    assert (tuned / "adapter_model.safetensors").is_file() == is_adapter
    assert (tuned / "model.safetensors").is_file() != is_adapter
    if is_adapter and parameters.train.lora.target_modules != "all-linear":
        targets = json.loads((tuned / "adapter_config.json").read_text())["target_modules"]
        assert set(targets) == set(parameters.train.lora.target_modules)

    evaluation = json.loads((reports / "evaluation.json").read_text())
    for model in ("base", "tuned"):
        assert model == "base" or math.isfinite(evaluation[model][f"nats_per_{unit}"])
        assert ("accuracy" in evaluation[model]) == (unit == "row")
        if unit == "token" and parameters.evaluate.num_generate_rows:
            assert 0 <= evaluation[model]["rouge_l"] <= 1
