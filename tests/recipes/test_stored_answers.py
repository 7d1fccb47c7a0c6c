"""What a training stores answers elsewhere as it was evaluated here: where it stops, and character for character."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.test_recipes import Trained, run_with, write_jsonl
from tests.support.plain_use import answer_plainly, read_samples
from tests.support.tiny import END, EOS, make_model, make_tokenizer

RECIPE = "qwen3_4b_chat"
MAX_NEW_TOKENS = 20


def save_model(folder: Path, *, tidies: bool = False) -> Path:
    """Write a model whose settings and tokenizer stop at ``<eos>`` while its template ends turns with ``<|end|>``."""
    model = make_model()
    model.config.eos_token_id = model.generation_config.eos_token_id = EOS
    model.save_pretrained(folder)
    tokenizer = make_tokenizer(eos_token="<eos>")
    tokenizer.clean_up_tokenization_spaces = tidies
    tokenizer.init_kwargs["clean_up_tokenization_spaces"] = tidies
    tokenizer.save_pretrained(folder)
    return folder


def train(folder: Path, model: Path, *, answer: str, method: str, max_steps: int) -> Trained:
    rows = [
        {"messages": [{"role": "user", "content": f"{n} ?"}, {"role": "assistant", "content": answer}]}
        for n in range(40)
    ]
    write_jsonl(folder / "rows.jsonl", rows)
    given: dict[str, Any] = {
        "model": {"name_or_path": str(model)},
        "data": {"path": str(folder / "rows.jsonl")},
        "split": {"validation": 4, "test": 4},
        "train": {
            "method": method,
            "num_epochs": None,
            "max_steps": max_steps,
            "learning_rate": 2e-2,
            "effective_batch_rows": 8,
            "effective_batch_tokens": None,
            "micro_batch_tokens": "auto",
            "eval_every_steps": None,
            "save_every_steps": None,
            "load_best": False,
            "early_stopping_evals": None,
            "precision": "float32",
        },
        "evaluate": {"generation": {"max_new_tokens": MAX_NEW_TOKENS}, "num_generate_rows": 4, "max_loss_rows": 4},
    }
    return run_with(RECIPE, folder, given)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_stored_model_stops_where_it_learned_to(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = train(tmp_path, save_model(tmp_path / "model"), answer="ok", method=method, max_steps=60)

    samples = read_samples(done.data, RECIPE)
    assert [sample["answer"] for sample in samples] == ["ok"] * 4, "the evaluation stops at the supervised end"
    stored = json.loads((done.tuned_model / "generation_config.json").read_text())
    assert stored["eos_token_id"] == [EOS, END]
    assert stored["do_sample"] is False
    answers = answer_plainly(
        done.tuned_model, [sample["input_ids"] for sample in samples], tmp_path, max_new_tokens=MAX_NEW_TOKENS
    )
    assert answers == ["ok"] * 4


def test_an_adapter_names_its_base_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "model")
    done = train(tmp_path, Path("model"), answer="ok", method="lora", max_steps=2)
    config = json.loads((done.tuned_model / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "model")


def test_text_is_decoded_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that tidies spaces would make ``p!= q, r?`` of it."""
    monkeypatch.chdir(tmp_path)
    answer = "p != q , r ?"
    done = train(tmp_path, save_model(tmp_path / "model", tidies=True), answer=answer, method="full", max_steps=60)
    with (done.data / "07_model_output" / RECIPE / "evaluation_samples.csv").open(newline="") as file:
        samples = list(csv.DictReader(file))
    assert [sample["reference"] for sample in samples] == [answer] * 4
    assert [sample["tuned"] for sample in samples] == [answer] * 4
    assert all(" ?" in sample["prompt"] for sample in samples)
    assert json.loads((done.reports / "evaluation.json").read_text())["samples"][0]["reference"] == answer
    assert answer in json.loads((done.reports / "health.json").read_text())["facts"]["first_example"]
