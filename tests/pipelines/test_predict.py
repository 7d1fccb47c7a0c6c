"""Rows of a file get their class from the command line, and an interrupted run goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.patience import PATIENCE_SECONDS
from tests.support.project_copy import copy_project
from tests.support.rounding import SAME_LOSS
from tests.support.shell import Shell
from tests.support.tiny import ids, make_model, save_tiny_model
from tests.support.tiny_tasks import LABEL_MAP, make_classifier, save_base, save_tuned_task

NAMES = list(LABEL_MAP)
TEXTS = ["my card is lost", "cash", "may I have a loan of 100?", "none of it, and a longer text than the others", "hm"]


class Project:
    """A copy of this project with a tuned classifier, as training stores it, and files of rows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        copy_project(folder)
        base = save_base(make_model(), folder / "models/tiny")
        model = make_classifier()
        model.model.load_state_dict(make_model().model.state_dict())
        self.tuned = folder / "data/06_models/smoke/tuned_model"
        self.tuned.parent.mkdir(parents=True)
        save_tuned_task(self.tuned, base, model, "lora", "sequence_classification", tokens_key="k", label_map=LABEL_MAP)
        facts = json.loads((self.tuned / "tuning.json").read_text())
        (self.tuned / "tuning.json").write_text(json.dumps({**facts, "compute_dtype": "float32"}))
        self.shell: Shell | None = None

    def write(self, name: str, *rows: object) -> str:
        """Write rows of JSON Lines, text as it is, and return the name."""
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (self.folder / name).write_text("".join(f"{line}\n" for line in lines))
        return name

    def arguments(self, *, pipeline: str = "predict", **params: object) -> list[str]:
        given: dict[str, object] = {"task": "sequence_classification", "environment.num_threads": 1}
        given |= {key.replace("__", "."): value for key, value in params.items()}
        text = ",".join(f"{key}={value}" for key, value in given.items())
        return ["run", "--env", "smoke", f"--pipelines={pipeline}", "--params", text]

    @property
    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
        return {**kept, "COLUMNS": "400"}

    def run(self, *, exit_code: int = 0, **params: object) -> str:
        """Run to the end in the shared process and return everything that was printed."""
        assert self.shell is not None
        done = self.shell.kedro(self.folder, *self.arguments(**params))
        printed = done.stdout + done.stderr
        assert done.code == exit_code, printed[-6000:]
        assert "Traceback" not in printed
        return printed

    @property
    def output(self) -> Path:
        return self.folder / "data/07_model_output/smoke/predictions.jsonl"

    @property
    def partial(self) -> list[Path]:
        return sorted((self.output.parent / "prediction_work").glob("predictions.*.partial.jsonl"))

    def predictions(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text(encoding="utf-8").splitlines()]

    def figures(self) -> Any:
        return json.loads((self.folder / "data/08_reporting/smoke/prediction.json").read_text())


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    folder = tmp_path_factory.mktemp("predict")
    project = Project(folder / "project")
    project.write("rows.jsonl", *({"text": text} for text in TEXTS))
    with Shell(folder, project.environment) as project.shell:
        yield project


def plain_scores(project: Project, texts: list[str]) -> list[list[float]]:
    """Let the libraries alone say how probable each class is, one text after the other."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    base: Any = AutoModelForSequenceClassification.from_pretrained(
        project.folder / "models/tiny", dtype=torch.float32, num_labels=4, pad_token_id=0
    )
    model = PeftModel.from_pretrained(base, project.tuned).eval()
    with torch.no_grad():
        return [torch.softmax(model(torch.tensor([ids(text)])).logits[0], -1).tolist() for text in texts]


def test_rows_get_the_class_that_the_libraries_alone_give_them(project: Project) -> None:
    printed = project.run(predict__path="rows.jsonl", predict__all_scores="true")
    rows, wanted = project.predictions(), plain_scores(project, TEXTS)
    assert [row["row_id"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["text"] for row in rows] == TEXTS
    for row, scores in zip(rows, wanted, strict=True):
        assert list(row["scores"]) == NAMES
        assert list(row["scores"].values()) == pytest.approx(scores, rel=SAME_LOSS, abs=2e-6)
        assert row["class"] == NAMES[scores.index(max(scores))]
        assert row["probability"] == pytest.approx(max(scores), rel=SAME_LOSS, abs=2e-6)
        assert not {"file", "row", "label", "likeliest"} & set(row)
    assert "5 rows predicted" in printed
    assert "rows per second" in printed
    figures = project.figures()
    assert (figures["num_rows"], figures["num_skipped"], figures["num_resumed"]) == (5, 0, 0)
    assert "labelled" not in figures
    assert not project.partial
    assert not list((project.output.parent / "prediction_work").iterdir()), "nothing is left behind"


def test_labels_are_compared_and_unknown_ones_are_told(project: Project) -> None:
    project.run(predict__path="rows.jsonl")
    answers = [row["class"] for row in project.predictions()]
    labels = [answers[0], answers[1], None, "no such class", next(name for name in NAMES if name != answers[4])]
    # The usual name of the column is found, whatever the training rows called it.
    rows = [{"text": text, "intent": label} for text, label in zip(TEXTS, labels, strict=True)]
    printed = project.run(predict__path=project.write("labelled.jsonl", *rows))
    assert "Accuracy on 4 labelled rows: 0.5000" in printed
    assert "1 labels are no class of the model and count as wrong" in printed
    assert project.figures()["labelled"]["num_labelled"] == 4
    assert [row.get("label") for row in project.predictions()] == labels
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{project.folder}/mlflow.db")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    newest = client.search_runs(experiments, order_by=["attributes.start_time DESC"])[0]
    assert newest.info.status == "FINISHED"
    assert newest.data.metrics["prediction/accuracy"] == 0.5
    assert [file.path for file in client.list_artifacts(newest.info.run_id, "predictions")] == [
        "predictions/predictions.jsonl"
    ]


def test_a_threshold_leaves_rows_without_a_class(project: Project) -> None:
    project.run(predict__path="rows.jsonl")
    before = project.predictions()
    threshold = round(sorted(row["probability"] for row in before)[2] - 1e-4, 4)
    for name in ("predict__abstain_below", "evaluate__abstain_below"):
        printed = project.run(predict__path="rows.jsonl", **{name: threshold})
        for row, plain in zip(project.predictions(), before, strict=True):
            if plain["probability"] < threshold:
                assert (row["class"], row["likeliest"]) == (None, plain["class"])
            else:
                assert row == plain
        assert f"No answer below a probability of {threshold:g}: 2 rows" in printed
        assert project.figures()["num_abstained"] == 2


def test_rows_of_several_files_in_any_format_say_where_they_are_from(project: Project) -> None:
    (project.folder / "more").mkdir(exist_ok=True)
    (project.folder / "more/a.csv").write_text('label,text\ncard,my card\n,"cash, please"\n')
    project.write("more/b.jsonl", {"text": "hm", "label": "card"})
    project.run(predict__path="more")
    rows = project.predictions()
    assert [(row["file"], row["row"]) for row in rows] == [
        ("more/a.csv", 1),
        ("more/a.csv", 2),
        ("more/b.jsonl", 1),
    ]
    assert [row.get("label") for row in rows] == ["card", None, "card"]


def test_a_template_and_columns_of_their_own_say_what_the_text_is(project: Project) -> None:
    name = project.write("other.jsonl", {"title": "my card", "body": "is lost", "text": "wrong"})
    project.run(predict__path=name, predict__template="'{title} {body}'")
    assert [row["text"] for row in project.predictions()] == ["my card is lost"]
    project.run(predict__path=name, predict__columns__text="body")
    assert [row["text"] for row in project.predictions()] == ["is lost"]
    # As the training rows were read.
    project.run(predict__path=name, data__columns__text="title", data__columns__label="intent")
    assert [row["text"] for row in project.predictions()] == ["my card"]


def test_all_bad_rows_are_told_before_any_work_and_the_earlier_file_stays(project: Project) -> None:
    project.run(predict__path="rows.jsonl")
    before = project.output.read_bytes()
    name = project.write("bad.jsonl", {"text": "good"}, "{no json", {"text": " "}, {"text": 7}, {"label": "x"})
    printed = project.run(predict__path=name, exit_code=2)
    for words in ("bad.jsonl, row 2", "bad.jsonl, row 3", "bad.jsonl, row 4", "bad.jsonl, row 5", "data.on_bad_row"):
        assert words in printed
    assert "Predicting" not in printed
    assert project.output.read_bytes() == before
    printed = project.run(predict__path=name, data__on_bad_row="skip", data__max_bad_fraction=0.9)
    assert "4 bad rows skipped" in printed
    assert [row["row_id"] for row in project.predictions()] == [1]


@pytest.mark.parametrize(
    ("name", "rows", "words"),
    [
        ("empty.jsonl", [], "empty.jsonl', which is empty"),
        ("none.jsonl", [{"question": "x", "more": "y"}], "none is usual for a text"),
        ("two.jsonl", [{"text": "x", "sentence": "y"}], "of which the text may be 'text' or 'sentence'"),
    ],
)
def test_files_that_cannot_be_read_are_told(project: Project, name: str, rows: list[object], words: str) -> None:
    printed = project.run(predict__path=project.write(name, *rows), exit_code=2)
    assert words in printed


def test_wrong_settings_are_told(project: Project) -> None:
    assert "predict.path = null" in project.run(exit_code=2)
    printed = project.run(predict__path="nowhere.jsonl", exit_code=2)
    assert "predict.path names" in printed
    assert "nowhere.jsonl', which does not exist" in printed
    printed = project.run(predict__path="rows.jsonl", predict__columns__text="txt", exit_code=2)
    assert "predict.columns.text names the column 'txt', which rows.jsonl does not have" in printed
    assert "Did you mean 'text'?" in printed
    printed = project.run(predict__path="rows.jsonl", predict__abstain_below=1, exit_code=2)
    assert "predict.abstain_below" in printed
    printed = project.run(predict__path="rows.jsonl", output="elsewhere", exit_code=2)
    assert "'tuned_model' is not stored yet" in printed


def test_a_language_model_is_sent_to_generate(project: Project, tmp_path: Path) -> None:
    from tests.support.stored import save_tuned

    folder = project.folder / "data/06_models/text/tuned_model"
    folder.parent.mkdir(parents=True)
    save_tuned(folder, save_tiny_model(tmp_path / "base"), "lora", tokens_key="k", compute_dtype="float32")
    printed = project.run(predict__path="rows.jsonl", output="text", exit_code=2)
    assert "kedro run --pipelines=generate" in printed


def test_a_base_that_is_gone_is_told_before_rows_are_read(project: Project) -> None:
    facts = json.loads((project.tuned / "tuning.json").read_text())
    gone = {**facts, "base": {**facts["base"], "name_or_path": "models/gone"}}
    try:
        (project.tuned / "tuning.json").write_text(json.dumps(gone))
        printed = project.run(predict__path="rows.jsonl", exit_code=2)
    finally:
        (project.tuned / "tuning.json").write_text(json.dumps(facts))
    assert "models/gone" in printed
    assert "Rows to predict" not in printed


MANY: dict[str, Any] = {"predict__path": "many.jsonl", "predict__micro_batch_tokens": 64}


def stop_in_the_middle(project: Project, **params: object) -> tuple[int, str]:
    """Send SIGTERM once some lines are there; return exit code and what was printed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kedro", *project.arguments(**params)],
        cwd=project.folder,
        env=project.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + PATIENCE_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if any(path.stat().st_size for path in project.partial):
            process.send_signal(signal.SIGTERM)
            break
        time.sleep(0.005)
    printed, _ = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, printed


def test_a_stopped_run_goes_on_and_predicts_nothing_twice(project: Project) -> None:
    texts = [f"{TEXTS[number % 4]} number {number} " * 4 for number in range(3000)]
    project.write("many.jsonl", *({"text": text, "label": NAMES[index % 4]} for index, text in enumerate(texts)))
    project.run(**MANY)
    expected, figures = project.predictions(), project.figures()
    before = project.output.stat().st_mtime_ns
    code, printed = stop_in_the_middle(project, **MANY)
    assert code == 143, printed[-3000:]
    [partial] = project.partial
    kept = partial.read_text().count("\n")
    assert 0 < kept < 3000
    assert f"{kept} of 3000 rows are predicted and kept" in printed
    assert project.output.stat().st_mtime_ns == before, "the earlier file stays whole"
    with partial.open("a") as file:
        file.write('{"row_id": 3000, "te')  # a line that the power cut short
    printed = project.run(**MANY)
    assert f"Going on: {kept} of 3,000 rows predicted already" in printed
    again = project.figures()
    assert again["num_resumed"] == kept
    assert again["labelled"] == figures["labelled"]
    assert again["per_class"] == figures["per_class"]
    assert [row["class"] for row in project.predictions()] == [row["class"] for row in expected]
    assert [row["row_id"] for row in project.predictions()] == list(range(1, 3001))
    assert not project.partial


def test_other_settings_or_weights_begin_again(project: Project) -> None:
    rows = ({"text": f"{TEXTS[number % 4]} number {number} " * 4} for number in range(3000))
    project.write("many.jsonl", *rows)
    assert stop_in_the_middle(project, **MANY)[0] == 143
    printed = project.run(**MANY | {"predict__all_scores": "true"})
    assert "They are not gone on with" in printed
    assert project.figures()["num_resumed"] == 0
    assert all("scores" in row for row in project.predictions())
    assert not project.partial, "what was left of the other work is removed once this is whole"
