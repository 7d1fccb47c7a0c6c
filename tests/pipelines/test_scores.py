"""Scores through ``kedro run``: planted answers have the scores that they deserve, and mistakes are named in time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.pipelines.test_whole_run import Project
from tests.support.shell import Shell
from tests.support.tiny import SPECIALS, make_model, make_tokenizer

METRICS = """
def length(references, answers, rows):
    assert all(row["prompt"].startswith("question") for row in rows)
    return [float(len(answer) == len(reference)) for reference, answer in zip(references, answers)]

length.signature = "same length|version:3"

def unsure(references, answers, rows):
    if answers != references:
        raise LookupError("no judge for these")
    return [1.0] * len(rows)

def failing(references, answers, rows):
    raise LookupError("no judge here")
"""
SCORES = {
    "names": ["rouge_sum", "rouge_l", "bleu", "chrf", "exact_match", "json_valid"],
    "rouge_tokenizer": "characters",
    "bleu_tokenizer": "char",
    "own_metrics": ["planted_metrics.length"],
}


class Scored(Project):
    """A project whose base answers in letters; the true answers of every other test row are those very answers."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / "src/planted_metrics.py").write_text(METRICS)
        import torch

        model = make_model(seed=3, tied=False)
        with torch.no_grad():
            # No special token is ever the likeliest, so every answer is text.
            model.lm_head.weight[: len(SPECIALS)] = 0
        model.save_pretrained(folder / "models/tiny")
        make_tokenizer().save_pretrained(folder / "models/tiny")

    def write_test(self, answers: dict[str, str]) -> None:
        """Write the held-out rows."""
        rows = [{"question": question, "answer": answer} for question, answer in answers.items()]
        (self.folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def set_scores(self, **scores: Any) -> None:
        """Set ``evaluate.scores`` of the smoke environment."""
        path = self.folder / "conf/smoke/parameters.yml"
        parameters = yaml.safe_load(path.read_text())
        parameters["evaluate"]["scores"] = scores
        parameters["evaluate"]["num_generate_rows"] = 100
        parameters["split"] = {"validation": 16, "test": 0}
        path.write_text(yaml.safe_dump(parameters))

    def go(self, *arguments: str, exit_code: int = 0) -> str:
        """Run with the test file."""
        printed = self.run(*arguments, exit_code=exit_code, data__test_path="test.jsonl")
        return " ".join(printed.split())

    def samples(self) -> Any:
        from pandas import read_csv

        return read_csv(self.folder / "data/07_model_output/smoke/evaluation_samples.csv", keep_default_na=False)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scored]:
    """A project that was run twice: once to learn what the base answers, and with that as the true answers."""
    folder = tmp_path_factory.mktemp("scores")
    project = Scored(folder / "project")
    with Shell(folder, project.environment) as project.shell:
        project.write_test({f"question {number}": f"answer {number}" for number in range(24)})
        project.set_scores(names=["rouge_l"])
        project.go()
        first = project.samples()
        answers = {
            prompt.removeprefix("user").strip(): base
            for prompt, base in zip(first["prompt"], first["base"], strict=True)
            if base and base == base.strip()
        }
        assert len(answers) > 10
        # Right, wrong by one word at the end, right, …
        project.write_test(
            {question: answer + " wrong" * (index % 2) for index, (question, answer) in enumerate(answers.items())}
        )
        project.set_scores(**SCORES)
        project.first = project.go()
        yield project


def test_planted_answers_have_the_scores_that_they_deserve(project: Scored) -> None:
    evaluation = project.read("08_reporting", "evaluation.json")
    samples = project.samples()
    base, tuned = evaluation["base"], evaluation["tuned"]
    is_right = samples["base"] == samples["reference"]
    assert samples["base"].tolist() == samples["reference"].str.removesuffix(" wrong").tolist()
    assert base["num_generated"] == len(samples) > 10
    assert is_right.sum() == -(-len(samples) // 2)
    assert base["exact_match"] == base["planted_metrics.length"] == pytest.approx(is_right.mean())
    assert tuned["exact_match"] == pytest.approx((samples["tuned"] == samples["reference"]).mean())
    # By characters, white space apart, a wrong one has its own a of a + 5; two counts of rows and one of a corpus.
    lengths = samples["base"].str.replace(r"\s", "", regex=True).str.len()
    wanted = [1.0 if right else 2 * length / (2 * length + 5) for right, length in zip(is_right, lengths, strict=True)]
    assert base["rouge_l"] == pytest.approx(sum(wanted) / len(wanted))
    assert base["rouge_l"] < base["rouge_sum"] / 2.5 < 1.2
    for name in ("bleu", "chrf"):
        assert 20 < base[name] < 100
    for name in SCORES["names"]:
        assert evaluation["improvement"][f"{name}_difference"] == pytest.approx(tuned[name] - base[name])
    assert base["bits_per_byte"] > 0
    assert base["num_bytes"] < base["num_tokens"]  # the end of an answer is a token without text
    assert 0 <= base["token_accuracy"] <= 1


def test_every_score_has_its_signature_and_is_in_mlflow(project: Scored) -> None:
    signatures = project.read("08_reporting", "evaluation.json")["signatures"]
    names = [*SCORES["names"], *SCORES["own_metrics"]]
    assert [*signatures] == [*names, "nats_per_token", "bits_per_byte", "token_accuracy"]
    assert "tok:characters.1" in signatures["rouge_sum"]
    assert "tok:char" in signatures["bleu"]
    assert signatures["planted_metrics.length"] == "own:planted_metrics.length|same length|version:3"
    metrics = project.mlflow_runs()[0].data.metrics
    for name in [*signatures, "perplexity"]:
        assert metrics[f"base/{name}"] is not None
        assert metrics[f"test/tuned_{name}"] is not None


def test_other_scores_do_not_measure_the_base_again(project: Scored) -> None:
    project.set_scores(names=["exact_match"], answer_pattern="([^ ])")
    try:
        printed = project.go("--pipelines=evaluate")
    finally:
        project.set_scores(**SCORES)
    assert "Evaluation of the base model: reused" in printed
    evaluation = project.read("08_reporting", "evaluation.json")
    assert evaluation["base"]["exact_match"] == 1.0
    assert evaluation["base"]["num_without_answer"] == 0
    assert evaluation["base"]["rouge_l"] is None


def test_a_metric_that_fails_on_answers_ends_the_run_when_all_else_is_stored(project: Scored) -> None:
    report = project.folder / "data/08_reporting/smoke/evaluation.json"
    report.unlink()
    project.set_scores(names=["chrf"], own_metrics=["planted_metrics.unsure"])
    try:
        printed = project.go("--pipelines=evaluate", exit_code=2)
    finally:
        project.set_scores(**SCORES)
    assert "planted_metrics.unsure raised LookupError: no judge for these" in printed
    assert "all other results are stored" in printed
    evaluation = json.loads(report.read_text())
    assert 20 < evaluation["base"]["chrf"] < 100
    assert [*evaluation["failed_scores"]] == ["planted_metrics.unsure"]
    assert project.mlflow_runs()[0].info.status == "FINISHED"


@pytest.mark.parametrize(
    ("scores", "wanted"),
    [
        ({"own_metrics": ["planted_metrics.missing"]}, "planted_metrics.missing is no function"),
        ({"own_metrics": ["no_such_module.score"]}, "no_such_module.score cannot be imported"),
        ({"names": ["json_schema"], "json_schema_path": "no.json"}, "json_schema_path = no.json"),
        ({"names": ["bleu"], "answer_pattern": "gsm8k"}, "answer_pattern is read by exact_match alone"),
    ],
)
def test_scores_that_cannot_be_made_stop_a_run_before_anything(
    project: Scored, scores: dict[str, Any], wanted: str
) -> None:
    before = (project.folder / "data/08_reporting/smoke/evaluation.json").read_bytes()
    project.set_scores(**scores)
    try:
        printed = project.go(exit_code=2)
    finally:
        project.set_scores(**SCORES)
    assert wanted in printed
    assert "Traceback" not in printed
    assert "Step 1 logged" not in printed
    assert (project.folder / "data/08_reporting/smoke/evaluation.json").read_bytes() == before


@pytest.mark.parametrize(
    ("scores", "wanted"),
    [
        ({"names": ["exact_match"], "answer_pattern": "gsm8k"}, "test.jsonl, row 1, "),
        ({"own_metrics": ["planted_metrics.failing"]}, "planted_metrics.failing raised LookupError: no judge here"),
    ],
)
def test_what_shows_only_on_rows_stops_before_a_model_is_measured(
    project: Scored, scores: dict[str, Any], wanted: str
) -> None:
    before = (project.folder / "data/08_reporting/smoke/evaluation.json").read_bytes()
    project.set_scores(**scores)
    try:
        printed = project.go("--pipelines=evaluate", exit_code=2)
    finally:
        project.set_scores(**SCORES)
    assert wanted in printed
    assert "Traceback" not in printed
    assert "Held-out loss of the" not in printed
    assert (project.folder / "data/08_reporting/smoke/evaluation.json").read_bytes() == before
