from __future__ import annotations

import itertools
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.parameters import (
    EvaluateParameters,
    ModelParameters,
    PreflightParameters,
    TokenizeParameters,
    TrainParameters,
)
from lm_tuning.parameters.data import ColumnParameters, DataParameters, SplitParameters
from lm_tuning.pipelines.example_data.nodes import prepare_raw_examples
from lm_tuning.pipelines.preflight.nodes import inspect_examples
from lm_tuning.pipelines.split.nodes import check_examples, split_examples
from lm_tuning.pipelines.tokenize.nodes import prepare_base_model, tokenize_examples
from lm_tuning.storage.folders import FolderStore
from tests.support.tiny import save_tiny_model


def run(*, max_rows: int | None = None, is_nested: bool = False, **train: Any) -> tuple[dict[str, Any], str, str]:
    """Run all nodes of the pipeline on rows with a bad one among them, each by itself or all in the lists of two."""
    rows: list[Any] = [{"prompt": f"{index}+1?", "response": str(index + 1)} for index in range(40)]
    rows.append({"prompt": 1, "response": "2"})
    data = DataParameters(path="rows.jsonl", on_bad_row="skip", max_rows=max_rows)
    if is_nested:
        rows = [{"pairs": rows[:20]}, {"pairs": rows[20:]}]
        columns = ColumnParameters(prompt="pairs.prompt", response="pairs.response")
        data = data.model_copy(update={"explode": "pairs", "columns": columns})
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    split = SplitParameters(validation=4, test=4)
    settings: dict[str, Any] = {"data": data, "split": split, "task": "causal_lm"}
    tokenize = TokenizeParameters(max_length_tokens=64)
    model = ModelParameters(name_or_path="model")
    caches = [FolderStore(Path(name)) for name in ("rows", "splits", "tokens")]
    checked, data_report = check_examples(prepare_raw_examples(data), check_cache=caches[0], **settings)
    training = TrainParameters(**{"effective_batch_rows": 4, "num_epochs": 3} | train)
    made, split_summary, split_report = split_examples(
        caches[0].publish(checked), split_cache=caches[1], train=training, seed=1, output="mine", **settings
    )
    splits = caches[1].publish(made)
    base_model = prepare_base_model(model, EvaluateParameters(), "causal_lm")
    tokens, token_summary, _, token_report = tokenize_examples(
        splits, base_model, token_cache=caches[2], tokenize=tokenize, train=training, seed=1, **settings
    )
    return inspect_examples(
        caches[2].publish(tokens),
        splits,
        base_model,
        token_summary=token_summary,
        split_summary=split_summary,
        data_report=data_report,
        split_report=split_report,
        token_report=token_report,
        model=model,
        tokenize=tokenize,
        train=training,
        preflight=PreflightParameters(num_examples=2),
        seed=1,
    )


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to run in, with a model."""
    monkeypatch.chdir(tmp_path)
    save_tiny_model(Path("model"))


def test_the_checks_comes_as_figures_markdown_page_and_on_the_terminal(caplog, capsys):
    caplog.set_level(logging.INFO)
    figures, markdown, page = run()
    assert figures["rows"]["num_rows_read"] == 41
    assert figures["rows"]["fates"][0] == {"stage": "skipped", "reason": "wrong type", "num_rows": 1}
    assert figures["findings"]["wrong_type"]["fate"] == "skipped"
    assert (figures["schedule"]["steps_per_epoch"], figures["metrics"]["data_total_steps"]) == (8, 24.0)
    assert len(figures["examples"]) == 2
    assert markdown.startswith("# Preflight\n")
    assert page.startswith("<!doctype html>")
    assert "Preflight: 41 rows read, 32 trained on; 8 steps and" in caplog.text
    assert "Issues" in capsys.readouterr().out


def test_what_the_parameters_say_reaches_the_figures():
    figures, _, _ = run(
        effective_batch_rows=None,
        effective_batch_tokens=40,
        max_steps=5,
        micro_batch_tokens=30,
        batching="padded",
        load_best=True,
        eval_every_steps=9,
        save_every_steps=7,
        trainer={"warmup_steps": 0.5},
    )
    schedule, padding = figures["schedule"], figures["padding"]
    names = ("effective_batch_tokens", "max_steps", "total_steps", "num_epochs", "warmup_steps_of_run")
    assert [schedule[name] for name in names] == [40, 5, 5, 3, 3]
    assert [schedule[name] for name in ("load_best", "eval_every_steps", "save_every_steps")] == [True, 9, 7]
    assert (padding["micro_batch_tokens"], padding["batching"]) == (30, "padded")


def test_a_run_of_one_step_on_the_first_rows_is_told_as_such(capsys):
    figures, markdown, page = run(max_rows=12, effective_batch_rows=4, num_epochs=1)
    assert figures["max_rows"] == 12
    for shown in (" ".join(capsys.readouterr().out.split()), markdown, page):
        text = re.sub(r"`|</?code>", "", shown)
        assert "data.max_rows: 12 ends the reading of a file after 12 rows. The file reached it; rows after" in text
        assert "positions per micro-batch, from the only step (4 rows) of the run." in text
        assert "Least, mean and most are of the only step of the run." in text
    _, markdown, _ = run(max_rows=42, effective_batch_rows=4, num_epochs=2)
    assert "data.max_rows" not in markdown
    assert "from all 8 steps (32 rows) of the first epoch." in markdown
    assert "Least, mean and most are of all 8 steps of the first epoch." in markdown
    _, markdown, _ = run(max_rows=12, effective_batch_rows=2, num_epochs=1)
    assert "from both steps (4 rows) of the run." in markdown
    assert "Least, mean and most are of both steps of the run." in markdown


def test_a_limit_counts_rows_of_the_file_and_not_what_became_of_them():
    figures, markdown, _ = run(max_rows=2, is_nested=True)
    assert figures["rows"]["num_rows_read"] == 41
    assert "`data.max_rows: 2` ends the reading of a file after 2 rows. The file reached it" in markdown
    assert "data.max_rows" not in run(max_rows=3, is_nested=True)[1]


def test_no_heading_is_repeated_below_itself(capsys):
    _, markdown, _ = run()
    headings = [line for line in markdown.splitlines() if line.startswith("#")]
    names = [heading.lstrip("# ") for heading in headings]
    assert all(name != above for above, name in itertools.pairwise(names)), names
    printed = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert all(line != above for above, line in itertools.pairwise(printed))


def test_the_graph_is_a_table():
    from lm_tuning.pipelines.preflight import create_pipeline

    pipeline = create_pipeline()
    assert [node.short_name for node in pipeline.nodes] == ["inspect_examples"]
    settings = {f"params:{name}" for name in ("model", "tokenize", "train", "preflight", "seed")}
    stored = {"tokenized_examples", "example_splits", "base_model", "token_summary", "split_summary"}
    sections = {"data_report", "split_report", "token_report"}
    assert pipeline.inputs() == settings | stored | sections
    assert pipeline.all_outputs() == {"preflight", "preflight_report", "preflight_page"}


@pytest.mark.parametrize(("added", "num_rows"), [("3+1", 4), ("13+1", 1), ("[[ticket]]", 0)])  # 3, 13, 23 and 33
def test_tokens_that_the_model_does_not_embed_are_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, added: str, num_rows: int
) -> None:
    from transformers import AutoTokenizer

    monkeypatch.chdir(tmp_path)
    folder = save_tiny_model(Path("model"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([added, "[[agent]]"])
    tokenizer.save_pretrained(folder)
    figures, markdown, _ = run()
    [issue] = [found for found in figures["concerns"] if found["level"] == "stop"]
    assert "Training refuses to start" in issue["text"]
    assert sum(figures["vocabulary"]["num_rows_beyond"].values()) == num_rows
    if num_rows:
        assert f"such as 104 ('{added}'); the first such row has the id " in issue["text"]
        assert " hold ids that" in issue["text"] if num_rows > 1 else " row holds ids that" in issue["text"]
        assert added in markdown
    else:
        assert "106 tokens and the model embeds 104" in issue["text"]
