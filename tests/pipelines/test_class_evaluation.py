"""A classifier's evaluation from the command line finds what was planted in its rows."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from sklearn import metrics

from tests.pipelines.test_predict import NAMES, Project
from tests.support.shell import Shell

NUM_ROWS, NUM_PLANTED = 80, 6
WORDS = ("card", "cash", "loan", "lost", "more", "bank", "why", "when", "10", "200")


def texts() -> list[str]:
    return [f"{WORDS[n % 10]} {WORDS[n // 10]} {WORDS[(3 * n + 1) % 10]} {n}" for n in range(NUM_ROWS)]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Project, dict[str, Any]]]:
    """A project whose test rows bear the labels that its model gives them, apart from a few that it is sure of.

    What was planted: the labels, the predictions, and the row ids of the wrong labels.
    """
    folder = tmp_path_factory.mktemp("class_evaluation")
    project = Project(folder / "project")
    with Shell(folder, project.environment) as project.shell:
        project.write("texts.jsonl", *({"text": text} for text in texts()))
        project.run(predict__path="texts.jsonl")
        rows = project.predictions()
        predictions = [row["class"] for row in rows]
        [(most, _)] = Counter(predictions).most_common(1)
        other = next(name for name in NAMES if name != most)
        sure = sorted((row for row in rows if row["class"] == most), key=lambda row: -row["probability"])
        wrong = {row["row_id"] for row in sure[:NUM_PLANTED]}
        labels = [other if row["row_id"] in wrong else row["class"] for row in rows]
        train = [{"text": f"{name} {number}", "label": name} for name in NAMES for number in range(3)]
        project.write("train.jsonl", *train)
        (project.folder / "held_out").mkdir()
        pairs = [{"text": text, "label": label} for text, label in zip(texts(), labels, strict=True)]
        project.write("held_out/a.jsonl", *pairs[:30])
        project.write("held_out/b.jsonl", *pairs[30:])
        given: dict[str, object] = {"data__path": "train.jsonl", "data__test_path": "held_out", "split__validation": 0}
        given |= {"model__name_or_path": "models/tiny", "evaluate__max_loss_rows": "null"}
        project.run(pipeline="split", **given)
        project.run(pipeline="tokenize", **given)
        current = project.folder / "data/05_model_input/smoke/tokens/current.json"
        facts = json.loads((project.tuned / "tuning.json").read_text())
        facts["tokens_key"] = json.loads(current.read_text())["key"]
        (project.tuned / "tuning.json").write_text(json.dumps(facts))
        printed = project.run(pipeline="evaluate", evaluate__top_k=2, evaluate__abstain_below=0.5, **given)
        yield (
            project,
            {
                "given": given,
                "labels": labels,
                "predictions": predictions,
                "wrong": wrong,
                "pair": (other, most),
                "sure": [row["probability"] for row in rows],
                "printed": printed,
            },
        )


def evaluation(project: Project) -> Any:
    return json.loads((project.folder / "data/08_reporting/smoke/evaluation.json").read_text())


def test_scores_are_those_of_scikit_learn_on_the_planted_labels(planted: tuple[Project, dict[str, Any]]) -> None:
    project, known = planted
    result, labels, predictions = evaluation(project), known["labels"], known["predictions"]
    tuned = result["tuned"]
    assert result["num_rows"] == NUM_ROWS
    assert tuned["accuracy"] == pytest.approx(1 - NUM_PLANTED / NUM_ROWS)
    for average in ("macro", "micro", "weighted"):
        wanted = metrics.f1_score(labels, predictions, average=average)
        assert tuned[f"{average}_f1"] == pytest.approx(wanted), average
    assert tuned["mean_probability"] == pytest.approx(sum(known["sure"]) / NUM_ROWS, abs=1e-5)
    answered = [index for index in range(NUM_ROWS) if known["sure"][index] >= 0.5]
    assert result["abstaining"]["num_answered"] == len(answered)
    right = sum(labels[index] == predictions[index] for index in answered)
    assert result["abstaining"]["accuracy"] == pytest.approx(right / len(answered))


def test_planted_confusions_and_wrong_labels_are_found(planted: tuple[Project, dict[str, Any]]) -> None:
    project, known = planted
    result = evaluation(project)
    [confusion] = result["confusions"]
    assert (confusion["reference"], confusion["predicted"]) == known["pair"]
    assert confusion["num_rows"] == NUM_PLANTED
    assert result["num_likely_mislabelled"] == NUM_PLANTED
    # Ids go on behind those of the training rows.
    offset = min(row["row_id"] for row in result["samples"]) - min(known["wrong"])
    found = {row["text"] for row in result["likely_mislabelled"]}
    assert found == {texts()[row_id - 1] for row_id in known["wrong"]}
    assert offset >= 0
    with (project.folder / "data/07_model_output/smoke/evaluation_samples.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert sum(row["is_likely_mislabelled"] == "True" for row in rows) == NUM_PLANTED


def test_report_figures_and_parts_are_there_and_in_mlflow(planted: tuple[Project, dict[str, Any]]) -> None:
    project, known = planted
    text = (project.folder / "data/08_reporting/smoke/evaluation.md").read_text(encoding="utf-8")
    for title in ("Calibration", "Labels that are likely wrong", "Hardest rows, the highest loss first", "By file"):
        assert f"## {title}" in text, title
    assert "held_out/a.jsonl" in text
    parts = {part["name"]: part for part in evaluation(project)["parts"]}
    for name, start, end in (("held_out/a.jsonl", 0, 30), ("held_out/b.jsonl", 30, NUM_ROWS)):
        labels, predictions = known["labels"][start:end], known["predictions"][start:end]
        assert parts[name]["tuned"]["accuracy"] == pytest.approx(metrics.accuracy_score(labels, predictions))
        wanted = metrics.f1_score(labels, predictions, average="macro")
        assert parts[name]["tuned"]["macro_f1"] == pytest.approx(wanted)
    folder = project.folder / "data/08_reporting/smoke/evaluation_figures"
    assert {"calibration", "confusion_matrix"} <= {path.stem for path in folder.glob("*.png")}
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{project.folder}/mlflow.db")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(experiments, order_by=["attributes.start_time DESC"])
    run = next(one for one in runs if "test/tuned_accuracy" in one.data.metrics)
    assert run.data.metrics["test/tuned_weighted_f1"] == evaluation(project)["tuned"]["weighted_f1"]
    artifacts = {file.path for file in client.list_artifacts(run.info.run_id, "reports")}
    assert {"reports/confusion_matrix.png", "reports/calibration.png"} <= artifacts


def test_a_k_beyond_the_classes_is_refused(planted: tuple[Project, dict[str, Any]]) -> None:
    project, known = planted
    printed = project.run(pipeline="evaluate", evaluate__top_k=9, exit_code=2, **known["given"])
    assert "evaluate.top_k = 9: the model has 4 classes" in printed
