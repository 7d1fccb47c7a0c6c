"""The parts of a run add up and are told apart, and the whole benchmark runs at its tiny size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.patience import PATIENCE_SECONDS
from tests.support.tiny import ASSISTANT, CHAT_TEMPLATE, END, SYSTEM, USER, ids, make_tokenizer

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def run_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module that reads logs."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import run_parts

    yield run_parts


def write_log(path: Path, lines: list[tuple[float, str]]) -> Path:
    path.write_text("".join(f"{at:.3f}\tsome.logger\t{message}\n  a line that goes on\n" for at, message in lines))
    return path


LANGUAGE_RUN = [
    (102.0, "Running node: prepare_raw_examples: prepare_raw_examples([params:data]) -> [raw_examples]"),
    (103.0, "Completed node: example_data.prepare_raw_examples"),
    (105.0, "Running node: train_model: train_model([tokenized_examples]) -> [tuned_model]"),
    (105.1, "Precision: bfloat16 products"),
    (105.2, "Compiled layers: yes, which pays in a run of an hour"),
    (109.0, "Micro-batches: 16,384 tokens, the fastest (planned in 4 s)."),
    (111.0, "Memory in GiB: weights 0.26; 2.15 in all."),
    (112.0, "Before step 1: measured loss 2.3890 nats/token"),
    (112.5, "First example, supervised part between the marks:"),
    (113.0, "step 0  held-out nats_per_token 3.9385"),
    (113.5, "Compiling 30 decoder layers, which takes up to a minute ..."),
    (120.0, "Compiled 30 decoder layers in 6 s."),
    (121.0, "Micro-batches: 32,768 tokens, as planned without."),
    (124.0, "step 10  held-out nats_per_token 3.5"),
    (130.0, "Training: 20 steps in 16 s, 1.2 steps/s"),
    (131.0, "step 20  held-out nats_per_token 3.2"),
    (132.0, "Checkpoint of step 20 written to /somewhere"),
    (133.0, "Saving data to tuned_model (ModelFolderDataset)..."),
    (133.2, "Saving data to training_summary (CSVDataset)..."),
    (134.0, "Completed node: train.train_model"),
    (134.5, "Running node: evaluate_models: evaluate_models([tuned_model]) -> [evaluation]"),
    (135.0, "Evaluating on 4 of 16 test rows, answering 2."),
    (137.5, "Held-out loss of the base model: 2/4 rows (50%), 2 rows/s, 1 s left"),
    (138.0, "Held-out loss of the base model: 4 rows in 1.0 s, 14 rows/s"),
    (143.0, "Answers of the base model: 1,500 tokens in 4.0 s, 375 tokens/s"),
    (146.0, "Held-out loss of the tuned model: 4 rows in 2.0 s, 11.9 rows/s"),
    (148.0, "Answers of the tuned model: 1,000 tokens in 1.5 s, 500 tokens/s"),
    (149.0, "Saving data to evaluation (JSONDataset)..."),
    (149.5, "Completed node: evaluate.evaluate_models"),
]


def test_the_parts_of_a_run_are_told_apart_and_add_up(run_parts: Any, tmp_path: Path) -> None:
    lines = run_parts.read_lines(write_log(tmp_path / "log", LANGUAGE_RUN))
    assert len(lines) == len(LANGUAGE_RUN)
    parts = run_parts.read_parts(lines, began=100.0, ended=151.0, step_seconds=10.0)
    assert parts == pytest.approx(
        {
            "imports and hooks": 2.0 + 2.0 + 0.5,
            "raw rows": 1.0,
            "planning": 4.0 + 1.0,
            "model load": 2.0 + 0.5 + 2.0 + 1.0,
            "pre-training checks": 1.5,
            "compile": 6.5,
            "training": 10.0,
            "held-out and checkpoints in training": 0.5 + (0.5 + 3.0 + 6.0 + 1.0 + 1.0 - 10.0),
            "model saved": 1.0,
            "held-out loss": 1.0 + 2.0,
            "answers base": 5.0,
            "answers tuned": 2.0,
            "scores and reports": 1.0 + 1.0 + 0.5,
            "exit": 1.5,
        }
    )
    assert sum(parts.values()) == pytest.approx(51.0)
    assert list(parts) == [part for part in run_parts.PARTS if part in parts]
    assert run_parts.read_answer_speeds(lines, parts) == pytest.approx({"base": 300.0, "tuned": 500.0})


def test_a_run_that_was_stopped_says_how_far_it_came(run_parts: Any, tmp_path: Path) -> None:
    lines = run_parts.read_lines(write_log(tmp_path / "log", LANGUAGE_RUN[:6]))
    parts = run_parts.read_parts(lines, began=100.0, ended=200.0, step_seconds=None)
    assert parts["planning"] == pytest.approx(4.0)
    assert parts["stopped in this part"] == pytest.approx(91.0)
    assert "exit" not in parts
    assert run_parts.read_lines(tmp_path / "none") == []


@pytest.mark.parametrize(("said", "seconds"), [("in 4.0 s, 2 rows/s", 4.0), ("in 12 s", 12.0), ("in 2:05 min", 125.0)])
def test_said_times_are_read(run_parts: Any, said: str, seconds: float) -> None:
    assert run_parts._said_seconds(f"Classes by the tuned model: 3,080 rows {said}") == seconds


def test_the_timed_file_gets_every_line_and_the_screen_no_more_than_before(run_parts: Any, tmp_path: Path) -> None:
    source = BENCHMARKS.parent / "conf/logging.yml"
    run_parts.write_logging_file(source, tmp_path / "logging.yml", tmp_path / "log")
    config = yaml.safe_load((tmp_path / "logging.yml").read_text())
    before = yaml.safe_load(source.read_text())
    assert config["root"]["handlers"] == [*before["root"]["handlers"], "timed"]
    assert {name: entry for name, entry in config["handlers"].items() if name != "timed"} == before["handlers"]
    for name in ("kedro.io.data_catalog", "kedro.runner.sequential_runner"):
        assert config["loggers"][name] == {"level": "INFO", "handlers": ["timed"], "propagate": False}


def test_the_plain_script_learns_the_answer_and_its_end_and_nothing_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "plain"))
    import language

    template = CHAT_TEMPLATE.replace("<|end|>{% endfor", "<|end|>\n{% endfor")
    tokenizer = make_tokenizer(chat_template=template)
    row = {"prompt": "abcdefgh", "response": "xy", "system": "s"}
    whole = language.tokenize(tokenizer, row, 99)
    prompt = [SYSTEM, *ids("s"), END, *ids("\n"), USER, *ids("abcdefgh"), END, *ids("\n"), ASSISTANT]
    assert whole["input_ids"] == [*prompt, *ids("xy"), END]
    assert whole["labels"] == [-100] * len(prompt) + [*ids("xy"), END]
    cut = language.tokenize(tokenizer, row, 10)
    assert cut["input_ids"] == [*prompt[:4], *prompt[-3:], *ids("xy"), END]
    assert cut["labels"] == [-100] * 7 + [*ids("xy"), END]


@pytest.mark.slow
@pytest.mark.parametrize("job", ["default", "banking77", "gsm8k"])
def test_a_tiny_job_runs_on_both_sides(job: str, tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "whole_job.py"), "--tiny", "--no-warm-up", "--jobs", job]
    command += ["--scratch", str(tmp_path / "scratch"), "--out", str(tmp_path / "out.jsonl")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    first, again, plain = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    assert [run["run"] for run in (first, again, plain)] == ["first", "again", "plain"]
    for run in (first, again, plain):
        assert run["is_whole"]
        assert "stopped in this part" not in run["parts"]
        assert sum(run["parts"].values()) == pytest.approx(run["wall_seconds"])
        assert min(run["parts"].values()) >= 0
        assert run["tokens_per_second"] > 0
        assert run["first_loss"] > 0
    # Both sides hold about as many tokens, and start from the same model on the same rows.
    assert plain["num_tokens"] == pytest.approx(first["num_tokens"], rel=0.3)
    expected = {"imports and hooks", "split", "tokenize", "model load", "training", "held-out loss", "exit"}
    assert expected <= set(first["parts"])
    assert first["num_steps"] == again["num_steps"] == plain["num_steps"]
    if job == "banking77":
        assert (
            set(plain["scores"]["tuned"]) == {"nats_per_row", "accuracy", "macro_f1"} <= set(first["scores"]["tuned"])
        )
    else:
        assert plain["scores"]["base"]["nats_per_token"] == pytest.approx(
            first["scores"]["base"]["nats_per_token"], rel=1e-4
        )
        assert {"answers base", "answers tuned"} <= set(first["parts"]) & set(plain["parts"])
        assert "answers base" not in again["parts"]
    assert f"| **all** | {first['wall_seconds']:.1f} |" in done.stdout


def test_a_job_without_its_rows_is_left_out_with_a_word(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "whole_job.py"), "--jobs", "gsm8k", "--no-warm-up"]
    environment = {key: value for key, value in os.environ.items() if key != "LM_TUNING_TEST_DATA"}
    command += ["--model", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "gsm8k: left out, --data names no folder with gsm8k/train.jsonl\n"
