"""Every recipe of ``conf/`` trains and evaluates a tiny random model of its architecture, with its own parameters."""

from __future__ import annotations

import contextlib
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
from tests.support.plain_use import answer_plainly, read_samples

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
            "precision": "float32",  # whatever the processor is fast at, so that other programs give the same answers
        },
        "evaluate": {"generation": {"max_new_tokens": 6}, "max_loss_rows": 6},
    }
    if load_parameters(make_loader(name), REPOSITORY).evaluate.num_generate_rows:
        small["evaluate"]["num_generate_rows"] = 2
    return small


@dataclass(frozen=True)
class Trained:
    """A recipe that was run.

    Attributes:
        folder: working folder of the run.
        parameters: that it ran with.
    """

    folder: Path
    parameters: Parameters

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def reports(self) -> Path:
        return self.data / "08_reporting" / self.parameters.output

    @property
    def tuned_model(self) -> Path:
        return self.data / "06_models" / self.parameters.output / "tuned_model"


def run(name: str, folder: Path) -> Trained:
    """Run a recipe in the working folder on a tiny model of its architecture."""
    recipe = RECIPES[name]
    model = save_model(folder / "model", recipe.architecture, has_template=recipe.has_template)
    recipe.write_rows(folder / "rows")
    return run_with(name, folder, with_small_sizes(name, model, folder / "rows"))


def run_with(name: str, folder: Path, given: dict[str, Any]) -> Trained:
    """Run all pipelines of a recipe in the working folder, with these values on top and without the hooks around."""
    loader = make_loader(name, **given)
    parameters = load_parameters(loader, REPOSITORY)
    catalog = DataCatalog.from_config(loader["catalog"])
    for key in type(parameters).model_fields:
        catalog[f"params:{key}"] = MemoryDataset(getattr(parameters, key), copy_mode="assign")
    SequentialRunner().run(register_pipelines()["__default__"], catalog)
    return Trained(folder, parameters)


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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Trained]]:
    """Run recipes, each once for all tests."""
    gc.freeze()  # what is loaded already would be searched for garbage longer than a tiny model's steps take
    known: dict[str, Trained] = {}

    def run_once(name: str) -> Trained:
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            with contextlib.chdir(folder):
                known[name] = run(name, folder)
        return known[name]

    yield run_once
    gc.unfreeze()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_and_evaluates(name: str, trained: Callable[[str], Trained]) -> None:
    parameters, reports = trained(name).parameters, trained(name).reports

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

    tuned = trained(name).tuned_model
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


@pytest.mark.parametrize("name", RECIPES)
def test_plain_libraries_answer_as_was_evaluated(name: str, trained: Callable[[str], Trained], tmp_path: Path) -> None:
    done = trained(name)
    samples = read_samples(done.data, name)
    has_classes = done.parameters.task == "sequence_classification"
    assert samples or not (has_classes or done.parameters.evaluate.num_generate_rows)
    if not samples:
        return
    limit = None if has_classes else done.parameters.evaluate.generation.max_new_tokens
    answers = answer_plainly(
        done.tuned_model, [sample["input_ids"] for sample in samples], tmp_path, max_new_tokens=limit
    )
    assert answers == [sample["answer"] for sample in samples]
