"""A file of prompts is answered from the command line, and an interrupted run goes on."""

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
from tests.support.shell import Shell
from tests.support.stored import save_tuned
from tests.support.tiny import ASSISTANT, END, USER, ids, make_tokenizer, save_tiny_model

QUESTIONS = ["what is 1?", "and 22?", "say cat", "now something longer than the others", "ok"]


class Project:
    """A copy of this project with a tuned model, as training stores it, and files of prompts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        copy_project(folder)
        base = save_tiny_model(folder / "models/tiny")
        self.tuned = folder / "data/06_models/smoke/tuned_model"
        self.tuned.parent.mkdir(parents=True)
        save_tuned(self.tuned, base, "lora", tokens_key="k", compute_dtype="float32")
        self.shell: Shell | None = None

    def write(self, name: str, *rows: object) -> str:
        """Write rows of JSON Lines, text as it is, and return the name."""
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (self.folder / name).write_text("".join(f"{line}\n" for line in lines))
        return name

    def arguments(self, **params: object) -> list[str]:
        given: dict[str, object] = {"data.path": "rows.jsonl", "generate.generation.max_new_tokens": 6}
        given["environment.num_threads"] = 1  # the model is too small for a second one
        given |= {f"generate.{key.replace('__', '.')}": value for key, value in params.items()}
        given = {key.replace("generate.data.", "data."): value for key, value in given.items()}
        text = ",".join(f"{key}={value}" for key, value in given.items())
        return ["run", "--env", "smoke", "--pipelines=generate", "--params", text]

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
        return printed

    @property
    def work(self) -> Path:
        return self.folder / "data/07_model_output/smoke/generating"

    @property
    def partial(self) -> list[Path]:
        return sorted(self.work.glob("generated.*.partial.jsonl"))

    def generated(self) -> list[dict[str, Any]]:
        text = (self.folder / "data/07_model_output/smoke/generated.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def answers(self) -> list[str]:
        return [row["answer"] for row in self.generated()]

    def figures(self) -> Any:
        return json.loads((self.folder / "data/08_reporting/smoke/generation.json").read_text())["figures"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    folder = tmp_path_factory.mktemp("generate")
    project = Project(folder / "project")
    project.write("prompts.jsonl", *({"prompt": question} for question in QUESTIONS))
    with Shell(folder, project.environment) as project.shell:
        yield project


def plain_answers(project: Project, prompts: list[list[int]], *, is_tuned: bool = True, most: int = 6) -> list[str]:
    """Let the libraries alone answer, one prompt after the other."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(project.folder / "models/tiny", dtype=torch.float32)
    if is_tuned:
        model = PeftModel.from_pretrained(model, project.tuned)
    tokenizer, answers = make_tokenizer(), []
    for prompt in prompts:
        given = torch.tensor([prompt])
        made = model.generate(
            input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=most, do_sample=False
        )
        answers.append(tokenizer.decode(made[0, len(prompt) :], skip_special_tokens=True))
    return answers


def asked(question: str) -> list[int]:
    return [USER, *ids(question), END, ASSISTANT]


def test_every_prompt_is_answered_in_the_order_of_the_file(project: Project) -> None:
    printed = project.run(prompts="prompts.jsonl")
    rows = project.generated()
    assert [row["prompt"] for row in rows] == QUESTIONS
    assert [row["row"] for row in rows] == [row["row_id"] for row in rows] == [1, 2, 3, 4, 5]
    assert {row["file"] for row in rows} == {"prompts.jsonl"}
    assert [row["answer"] for row in rows] == plain_answers(project, [asked(question) for question in QUESTIONS])
    for row in rows:
        assert row["finish_reason"] in ("stop", "length")
        assert (row["finish_reason"] == "length") == (row["num_tokens"] == 6)
        assert row["log_probability"] < 0
    figures = project.figures()
    assert figures["num_answers"] == figures["num_answered_now"] == 5
    assert figures["num_tokens"] == sum(row["num_tokens"] for row in rows)
    assert figures["tokens_per_second"] > 0
    assert "5 prompts answered by the tuned model" in printed
    assert "tokens per second" in printed
    assert not project.partial, "nothing is left of the work"
    assert not (project.work / "prompts.arrow").exists()


def test_the_run_is_in_mlflow_with_its_figures_settings_and_answers(project: Project) -> None:
    from mlflow.tracking import MlflowClient

    project.run(prompts="prompts.jsonl", max_rows=2)
    client = MlflowClient(f"sqlite:///{project.folder}/mlflow.db")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    run, *_ = client.search_runs(experiments, order_by=["attributes.start_time DESC"])
    assert run.info.status == "FINISHED"
    assert run.data.params["generate.generation.max_new_tokens"] == "6"
    assert run.data.metrics["answers/num_answers"] == 2
    assert run.data.metrics["answers/tokens_per_second"] > 0
    assert {name.partition("/")[0] for name in run.data.metrics} == {"answers"}
    assert [artifact.path for artifact in client.list_artifacts(run.info.run_id, "generated")] == [
        "generated/generated.jsonl"
    ]


def test_answers_in_the_file_are_left_out_and_other_shapes_are_asked_alike(project: Project) -> None:
    expected = plain_answers(project, [asked(question) for question in QUESTIONS])
    with_answers = [{"prompt": question, "response": "no"} for question in QUESTIONS]
    project.run(prompts=project.write("answered.jsonl", *with_answers))
    assert project.answers() == expected
    turns = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "no"}]}
        for question in QUESTIONS
    ]
    project.run(prompts=project.write("turns.jsonl", *turns))
    assert project.answers() == expected
    assert project.generated()[0]["prompt"] == [{"role": "user", "content": QUESTIONS[0]}]
    (project.folder / "prompts.csv").write_text("id,q\n" + "".join(f'{n},"{q}"\n' for n, q in enumerate(QUESTIONS)))
    project.run(prompts="prompts.csv", columns__prompt="q")
    assert project.answers() == expected


def test_instructions_and_earlier_turns_are_asked_as_in_training(project: Project) -> None:
    rows = [{"instruction": "add", "input": "1 2", "output": "3"}, {"instruction": "hello", "input": "", "output": "x"}]
    project.run(prompts=project.write("instructions.jsonl", *rows))
    assert project.answers() == plain_answers(project, [asked("add\n\n1 2"), asked("hello")])
    turns = [("system", "hm"), ("user", "a"), ("assistant", "b"), ("user", "c")]
    project.run(prompts=project.write("long.jsonl", {"messages": [{"role": r, "content": c} for r, c in turns]}))
    tokenizer = make_tokenizer()
    given = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns], add_generation_prompt=True, return_dict=False
    )
    assert project.answers() == plain_answers(project, [given])


def test_the_template_of_the_training_rows_words_the_prompts(project: Project) -> None:
    name = project.write("fields.jsonl", {"x": "1"}, {"x": "2"})
    project.run(prompts=name, data__template="'{x} and?'", data__columns__response="y")
    assert project.answers() == plain_answers(project, [asked("1 and?"), asked("2 and?")])
    project.run(prompts=name, data__template="'{z}'", data__columns__response="y", template="'{x} or?'")
    assert [row["prompt"] for row in project.generated()] == ["1 or?", "2 or?"]


def test_the_base_is_asked_in_the_same_wording(project: Project) -> None:
    printed = project.run(prompts="prompts.jsonl", model="base")
    prompts = [asked(question) for question in QUESTIONS]
    assert project.answers() == plain_answers(project, prompts, is_tuned=False)
    assert project.answers() != plain_answers(project, prompts)
    assert "answered by the base model" in printed


def test_bad_rows_are_named_together_before_any_answer(project: Project) -> None:
    rows = [{"prompt": "good"}, {"prompt": 3}, "not json", {"prompt": " "}, {"other": "x"}, {"prompt": "good too"}]
    name = project.write("bad.jsonl", *rows)
    project.run(prompts="prompts.jsonl")
    before = project.generated()
    printed = project.run(prompts=name, exit_code=2)
    for number in (2, 3, 4, 5):
        assert f"bad.jsonl, row {number}:" in printed, printed[-3000:]
    assert "data.on_bad_row: skip" in printed
    assert "row 1:" not in printed
    assert project.generated() == before, "the answers of before stay"
    assert "Answering" not in printed
    printed = project.run(prompts=name, data__on_bad_row="skip", data__max_bad_fraction=0.9)
    assert [(row["row"], row["prompt"]) for row in project.generated()] == [(1, "good"), (6, "good too")]
    assert project.figures()["prompts"]["num_skipped"] == 4


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"prompts": "empty.jsonl"}, ["generate.prompts names 'empty.jsonl', which is empty"]),
        ({"prompts": "nowhere.jsonl"}, ["generate.prompts", "nowhere.jsonl"]),
        ({}, ["generate.prompts = null"]),
        (
            {"prompts": "prompts.jsonl", "generation__max_new_tokens": 600},
            ["generate.generation.max_new_tokens = 600 is too long"],
        ),
        ({"prompts": "prompts.jsonl", "template": "'{question}'"}, ["generate.template names the column 'question'"]),
        ({"prompts": "prompts.jsonl", "model": "both"}, ["generate.model", "tuned"]),
        ({"prompts": "prompts.jsonl", "generation__temperature": 0.5}, ["generate.generation.do_sample"]),
    ],
)
def test_what_is_wrong_is_told_and_ends_with_exit_code_2(
    project: Project, params: dict[str, Any], words: list[str]
) -> None:
    (project.folder / "empty.jsonl").write_text("")
    printed = project.run(exit_code=2, **params)
    assert all(word in printed for word in words), printed[-3000:]
    assert "Traceback" not in printed


def test_without_a_tuned_model_the_command_that_makes_one_is_named(project: Project) -> None:
    aside = project.tuned.rename(project.folder / "aside")
    try:
        printed = project.run(prompts="prompts.jsonl", exit_code=2)
    finally:
        aside.rename(project.tuned)
    assert "'tuned_model' is not stored yet" in printed
    assert "kedro run --pipelines=" in printed


def change_tuning(project: Project, **changes: Any) -> str:
    """Change what the tuned model says of itself; return what it said."""
    path = project.tuned / "tuning.json"
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | changes))
    return before


def test_a_base_that_cannot_be_reached_ends_the_run_before_any_prompt_is_read(project: Project) -> None:
    base = json.loads((project.tuned / "tuning.json").read_text())["base"]
    before = change_tuning(project, base={**base, "name_or_path": "nobody/has-this-model"})
    try:
        printed = project.run(prompts="prompts.jsonl", exit_code=2)
    finally:
        (project.tuned / "tuning.json").write_text(before)
    assert "nobody/has-this-model" in printed
    assert "Reading prompts" not in printed


def test_a_classifier_is_told_which_pipeline_is_for_it(project: Project) -> None:
    before = change_tuning(project, task="sequence_classification")
    try:
        printed = project.run(prompts="prompts.jsonl", exit_code=2)
    finally:
        (project.tuned / "tuning.json").write_text(before)
    assert "--pipelines=predict" in printed


def test_drawn_answers_are_the_same_again_and_others_by_another_seed(project: Project) -> None:
    drawing = {"prompts": "prompts.jsonl", "generation__do_sample": "true", "generation__temperature": 2.0}
    project.run(**drawing)
    first = project.answers()
    project.run(**drawing, batch_rows=1)
    assert project.answers() == first
    project.run(**drawing, generation__seed=7)
    assert project.answers() != first


MANY = {"prompts": "many.jsonl", "generation__max_new_tokens": 60, "batch_rows": 1}


def stop_in_the_middle(project: Project, **params: object) -> tuple[int, str]:
    """Send SIGTERM once some answers are there; return exit code and what was printed."""
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
        if any(path.read_text().count("\n") >= 3 for path in project.partial):
            process.send_signal(signal.SIGTERM)
            break
        time.sleep(0.02)
    printed, _ = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, printed


def test_a_stopped_run_goes_on_and_answers_nothing_twice(project: Project) -> None:
    project.write("many.jsonl", *({"prompt": f"number {number}"} for number in range(40)))
    project.run(**MANY)
    expected, before = project.generated(), (project.folder / "data/07_model_output/smoke/generated.jsonl").stat()
    code, printed = stop_in_the_middle(project, **MANY)
    assert code == 143, printed[-3000:]
    [partial] = project.partial
    kept = [json.loads(line) for line in partial.read_text().splitlines()]
    assert 3 <= len(kept) < 40
    assert f"{len(kept)} of 40 prompts are answered and kept" in printed
    after = (project.folder / "data/07_model_output/smoke/generated.jsonl").stat()
    assert after.st_mtime_ns == before.st_mtime_ns, "the earlier answers stay whole"
    # A line that the power cut short is made again.
    with partial.open("a") as file:
        file.write('{"row_id": 40, "ans')
    printed = project.run(**MANY)
    assert f"Going on: {len(kept)} of 40 prompts answered already" in printed
    assert project.generated() == expected
    figures = project.figures()
    assert (figures["num_answered_before"], figures["num_answered_now"]) == (len(kept), 40 - len(kept))
    assert figures["num_answers"] == 40
    assert not project.partial


def test_other_prompts_settings_or_weights_start_again_and_say_why(project: Project) -> None:
    project.write("many.jsonl", *({"prompt": f"number {number}"} for number in range(40)))
    assert stop_in_the_middle(project, **MANY)[0] == 143
    printed = project.run(**MANY | {"generation__max_new_tokens": 2})
    assert "something else is asked now (generate.generation" in printed
    assert project.figures()["num_answered_now"] == 40
    assert not project.partial, "what was left of the other work is removed once this is whole"
