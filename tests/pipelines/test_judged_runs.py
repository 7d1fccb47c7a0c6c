"""Whole runs that end with a verdict: against the base, against an earlier model, and against a gate.

A tiny model is trained until it names the animal of each question, then another one for a few steps. The rows of one
animal in seventeen have a wrong answer, which the report has to name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.project_copy import copy_project
from tests.support.shell import Shell
from tests.support.tiny import save_tiny_model

ANIMALS = ["cat", "dog", "bird", "fish", "horse", "sheep", "goat", "duck"]
WRONG = 17
SETTINGS = {
    "model.name_or_path": "models/tiny",
    "data.path": "rows.jsonl",
    "split.test": 0.25,
    "evaluate.max_loss_rows": "null",
    "evaluate.num_generate_rows": 60,
    "evaluate.generation.max_new_tokens": 16,
    "evaluate.num_samples": 3,
    "train.method": "full",
    "train.learning_rate": 0.01,
}


class Judged:
    """A project with a model that was trained well, as ``smoke``."""

    def __init__(self, folder: Path, shell: Shell) -> None:
        self.folder, self.shell = folder, shell

    def run(self, *arguments: str, exit_code: int = 0, **params: object) -> str:
        """Run in the smoke environment and return everything that was printed."""
        given = SETTINGS | {key.replace("__", "."): value for key, value in params.items()}
        text = ",".join(f"{key}={value}" for key, value in given.items())
        done = self.shell.kedro(self.folder, "run", "--env", "smoke", *arguments, "--params", text)
        assert done.code == exit_code, (done.stdout + done.stderr)[-6000:]
        return done.stdout + done.stderr

    def report(self, name: str, output: str = "smoke") -> str:
        """Read a report."""
        return (self.folder / "data/08_reporting" / output / name).read_text(encoding="utf-8")

    def result(self, output: str = "smoke") -> Any:
        """Read the evaluation."""
        return json.loads(self.report("evaluation.json", output))

    def last_mlflow_run(self) -> Any:
        """Return the newest run of the project's store."""
        from mlflow.tracking import MlflowClient

        client = MlflowClient(f"sqlite:///{self.folder}/mlflow.db")
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        return client.search_runs(experiments, order_by=["attributes.start_time DESC"])[0]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judged]:
    scratch = tmp_path_factory.mktemp("judged")
    folder = scratch / "project"
    copy_project(folder)
    save_tiny_model(folder / "models/tiny")
    rows = [
        {
            "question": f"{ANIMALS[n % 8]} number {n}?",
            "answer": f"it is a {ANIMALS[n % 8]}" if n % WRONG else "<b>zebra</b>",
        }
        for n in range(240)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    with Shell(scratch, {**environment, "COLUMNS": "400"}) as shell:
        project = Judged(folder, shell)
        project.run(train__max_steps=80)
        yield project


def test_a_better_model_is_called_better_everywhere(judged: Judged) -> None:
    result = judged.result()
    first = result["scores"][0]
    assert first["outcome"] == "better"
    assert first["num_rows"] == 60
    assert re.fullmatch(
        r"Better by 0\.\d+ ROUGE-\w, 95 % 0\.\d+ to 0\.\d+, p < 0\.001 \(60 rows\)\.", result["verdict"]
    )
    for score in result["scores"]:
        assert score["tuned"]["low"] <= score["tuned"]["value"] <= score["tuned"]["high"]
        assert score["signature"]
    loss = next(score for score in result["scores"] if score["name"] == "nats_per_token")
    assert loss["tuned"]["value"] == pytest.approx(result["tuned"]["nats_per_token"])
    assert loss["outcome"] == "better"
    assert result["earlier_run"] is None
    for name in ("evaluation.md", "evaluation.html"):
        # Markdown and a page escape the sign of "less than" each in its own way.
        assert result["verdict"].partition(", p <")[0] in judged.report(name), name


def test_every_row_is_stored_under_both_models(judged: Judged) -> None:
    import pandas as pd

    result = judged.result()
    table = pd.read_csv(judged.folder / "data/07_model_output/smoke/evaluation_row_scores.csv")
    assert len(table) == sum(2 * score["num_rows"] for score in result["scores"])
    tuned = table[(table.model == "tuned") & (table.score == "rouge_l")]
    assert tuned["value"].mean() == pytest.approx(result["tuned"]["rouge_l"])
    assert set(tuned["model_digest"]) == {result["model_digests"]["tuned"]}
    assert set(table[table.model == "base"]["model_digest"]) == {result["model_digests"]["base"]}


def test_rows_with_a_wrong_answer_are_the_hardest(judged: Judged) -> None:
    hard = judged.result()["hard_rows"]
    numbers = [int(re.fullmatch(r"rows\.jsonl, row (\d+)", row["where"]).group(1)) - 1 for row in hard]  # type: ignore[union-attr]
    wrong = [number for number in numbers if number % WRONG == 0]
    assert len(wrong) >= 2, "some of fifteen are in the test"
    assert numbers[: len(wrong)] == wrong
    assert [row["is_suspect"] for row in hard] == [number in wrong for number in numbers]
    page, text = judged.report("evaluation.html"), judged.report("evaluation.md")
    for row in hard:
        assert f'<a href="#row-{row["row_id"]}">' in page and f'<h3 id="row-{row["row_id"]}">' in page
        assert f"[{row['row_id']}](#row-{row['row_id']})" in text and f"### Row {row['row_id']}\n" in text
    assert "<b>zebra</b>" not in page and "&lt;b&gt;zebra&lt;/b&gt;" in page, "escaped"
    assert page.count('id="row-') == len(set(re.findall(r'id="(row-\d+)"', page))), "each anchor once"


def test_answers_are_sorted_into_kinds(judged: Judged) -> None:
    import pandas as pd

    result = judged.result()
    kinds = {kind["kind"]: kind for kind in result["answer_kinds"]}
    assert kinds["empty"]["num_base"] > 50, "the random base says nothing that can be read"
    answers = pd.read_csv(judged.folder / "data/07_model_output/smoke/evaluation_samples.csv", keep_default_na=False)
    cut_off = int((answers["tuned_finish_reason"] == "length").sum())
    assert cut_off == kinds.get("cut off at the longest answer", {"num_tuned": 0})["num_tuned"]
    by_id = dict(zip(answers["row_id"], answers["tuned"], strict=True))
    texts = {row["row_id"]: row for row in result["row_texts"]}
    for row_id in (*result["best_rows"], *result["worst_rows"]):
        assert texts[row_id]["tuned"] == by_id[row_id]
    score = answers.set_index("row_id")["tuned_rouge_l"]
    assert min(score[result["best_rows"]]) == sorted(score)[-3]
    assert max(score[result["worst_rows"]]) == sorted(score)[2]


def test_mlflow_has_intervals_table_page_and_plots(judged: Judged) -> None:
    from mlflow.tracking import MlflowClient

    run, result = judged.last_mlflow_run(), judged.result()
    score = next(score for score in result["scores"] if score["name"] == "rouge_l")
    for key in ("low", "high"):
        assert run.data.metrics[f"test/interval_rouge_l.tuned_{key}"] == pytest.approx(score["tuned"][key])
    assert run.data.metrics["test/interval_rouge_l.p_value"] == pytest.approx(score["difference"]["p_value"])
    client = MlflowClient(f"sqlite:///{judged.folder}/mlflow.db")
    stored = {file.path for file in client.list_artifacts(run.info.run_id, "reports")}
    names = ("evaluation.html", "evaluation_row_scores.csv", "scores.png", "loss_by_row.png")
    assert {f"reports/{name}" for name in names} <= stored


# From here on runs change what lies there, in this order.


def test_a_gate_that_is_reached_changes_nothing(judged: Judged) -> None:
    before = judged.result()
    printed = judged.run("--pipelines=evaluate", evaluate__gate="{rouge_l: better, perplexity: 1000}")
    assert "evaluate.gate.rouge_l reached: better than the base is asked for" in printed
    after = judged.result()
    assert [bound["is_reached"] for bound in after["gate"]] == [True, True]
    assert {key: after[key] for key in before} == before
    assert after["gate_bounds"] == {"num_bounds": 2, "num_not_reached": 0}


def test_a_gate_that_is_missed_is_exit_code_3_with_all_results(judged: Judged) -> None:
    page = judged.folder / "data/08_reporting/smoke/evaluation.html"
    page.unlink()
    printed = judged.run("--pipelines=evaluate", exit_code=3, evaluate__gate="{rouge_l: 1.5, nats_per_token: better}")
    last = printed.strip().splitlines()[-2:]
    assert re.search(
        r"evaluate\.gate\.rouge_l not reached: ROUGE-L is 0\.\d+ \(0\.\d+ to [01]\.\d+\), at least 1\.5", last[0]
    )
    assert last[1] == "All results are kept, and the run in MLflow is finished."
    assert "Traceback" not in printed
    assert "<code>evaluate.gate.rouge_l</code> not reached" in page.read_text()
    run = judged.last_mlflow_run()
    assert run.info.status == "FINISHED"
    assert run.data.metrics["test/gate_num_not_reached"] == 1
    assert judged.run("--pipelines=evaluate"), "the next run is judged by its own gate"


def test_a_gate_on_an_unknown_score_is_refused_before_any_work(judged: Judged) -> None:
    printed = judged.run("--pipelines=evaluate", exit_code=2, evaluate__gate="{rouge_L: 0.3}")
    assert "evaluate.gate.rouge_L: there is no such score. Did you mean rouge_l?" in printed
    assert "Evaluating on" not in printed


def test_a_worse_model_is_compared_with_the_best_earlier_one(judged: Judged) -> None:
    best = judged.result()
    printed = judged.run(train__max_steps=12, output="second")
    result = judged.result("second")
    earlier = result["earlier_run"]
    assert (earlier["output"], earlier["num_rows"], earlier["outcome"]) == ("smoke", 60, "worse")
    assert earlier["model_digest"] == best["model_digests"]["tuned"]
    assert earlier["earlier"] == pytest.approx(best["scores"][0]["tuned"]["value"])
    assert re.search(r"Against the earlier model on this data, output smoke of [\d: -]+: worse by 0\.", printed)
    assert "Against the earlier model on this data, output smoke" in judged.report("evaluation.md", "second")
