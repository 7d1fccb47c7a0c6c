"""What version 0.1 stored is found again: rows, splits, tokens, checkpoints, tuned models, evaluations.

``tests/fixtures/stored_0_1`` holds a small project with all of it, one environment for each kind of model, and
``recorded.json`` what its runs came to (``tests/fixtures/make_stored.py``). Where these tests fail, users of that
version lose what they have: their tokens are made again and their trainings cannot go on.

No key depends on the machine, on absolute paths or on the version of a library, so the tests hold wherever they run.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.project_copy import copy_project
from tests.support.rounding import SAME_LOSS
from tests.support.shell import Shell

STORED = Path(__file__).resolve().parents[1] / "fixtures/stored_0_1"
RECORDED: dict[str, Any] = json.loads((STORED / "recorded.json").read_text(encoding="utf-8"))
CASES = tuple(RECORDED["cases"])
# Each is a process or two of half a minute: what differs between them most is always tried.
RUNS = [pytest.param(case, marks=() if case in {"full", "adapter"} else pytest.mark.slow) for case in CASES]
STORES = {
    "rows": "data/02_intermediate/{}/rows",
    "splits": "data/02_intermediate/{}/splits",
    "tokens": "data/05_model_input/{}/tokens",
    "base_evaluation": "data/07_model_output/{}/base_evaluation",
}
LONG_AGO = 1_000_000_000
"""Seconds since 1970. When files were written, or checked out, says nothing about them."""

SCHEMA_VERSION, ROWS_VERSION = 1, 4
"""Of what is stored. A test cannot ask the code: where the code's differ, users' stores are not found any more."""


class Project:
    """A project of today's code with what version 0.1 stored in another folder, perhaps on another machine."""

    def __init__(self, folder: Path, shell: Shell) -> None:
        self.folder = folder
        self.shell = shell
        copy_project(folder)
        for name in CASES:
            shutil.copytree(STORED / "project/conf" / name, folder / "conf" / name)
            rename_settings(folder / "conf" / name / "parameters.yml")

    def restore(self) -> None:
        """Write what was stored there, as it was, and nothing else."""
        for name in ("data", "models"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
            shutil.copytree(STORED / "project" / name, self.folder / name, copy_function=shutil.copyfile)
        for path in STORED.glob("project/*.jsonl"):
            shutil.copyfile(path, self.folder / path.name)
        for path in [*self.folder.glob("*.jsonl"), *self.folder.glob("data/**/*"), *self.folder.glob("models/**/*")]:
            os.utime(path, (LONG_AGO, LONG_AGO))

    def run(self, case: str, *arguments: str, exit_code: int = 0, **params: object) -> str:
        """Run and return everything that was printed."""
        given = ",".join(f"{key.replace('__', '.')}={value}" for key, value in params.items())
        done = self.shell.kedro(self.folder, "run", "--env", case, *arguments, *(("--params", given) if given else ()))
        printed = done.stdout + done.stderr
        assert done.code == exit_code, printed[-6000:]
        if exit_code:
            assert "Traceback" not in printed, printed[-6000:]
        return printed

    def store(self, what: str, case: str) -> Path:
        return self.folder / STORES[what].format(case)

    def checkpoint(self, case: str) -> Path:
        (marker,) = (self.folder / f"data/06_models/{case}/checkpoints").glob("run-*/*/lm_tuning_checkpoint.json")
        return marker.parent

    def losses(self, case: str) -> list[float]:
        column = f"loss_nats_per_{RECORDED['cases'][case]['unit']}"
        return [float(row[column]) for row in self.steps(case)]

    def validation_losses(self, case: str) -> dict[str, float]:
        column = f"validation_nats_per_{RECORDED['cases'][case]['unit']}"
        return {row["step"]: float(row[column]) for row in self.steps(case) if row[column]}

    def steps(self, case: str) -> list[dict[str, str]]:
        return read_csv(self.folder / f"data/08_reporting/{case}/training_summary.csv")

    def report(self, case: str, name: str) -> Any:
        return read(self.folder / f"data/08_reporting/{case}/{name}")


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    folder = tmp_path_factory.mktemp("stored")
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    # What is stored was made without a graphics card; the base's evaluation and the losses are those of a CPU.
    with Shell(folder, {**kept, "COLUMNS": "400", "CUDA_VISIBLE_DEVICES": ""}) as shell:
        yield Project(folder / "project", shell)


@pytest.fixture
def project(copied: Project) -> Project:
    copied.restore()
    return copied


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def rename_settings(path: Path) -> None:
    """Write settings under the names that they have today, as users of that version have to."""
    text = path.read_text(encoding="utf-8")
    before = "  max_new_tokens: 6\n  num_beams: 1\n"
    assert before in text
    after = "  generation:\n    max_new_tokens: 6\n    num_beams: 1\n"
    path.write_text(text.replace(before, after), encoding="utf-8")


def digest_of(values: Any) -> str:
    """Name settings as version 0.1 does."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


def contents(*folders: Path) -> dict[Path, tuple[bytes, int | None]]:
    """Return bytes and time of the last change of each file; files that note the last use are written each time."""
    notes = ("manifest.json", "current.json")
    return {
        path: (path.read_bytes(), None if path.name in notes else path.stat().st_mtime_ns)
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file()
    }


def find_changes(before: dict[Path, Any], *folders: Path) -> list[str]:
    """Name the files that are other ones than before, new or gone."""
    now = contents(*folders)
    return sorted(str(path) for path in before.keys() | now.keys() if before.get(path) != now.get(path))


def assert_same_evaluation(project: Project, case: str) -> None:
    """The figures of both models are the recorded ones, but for rounding; the base's were not measured again."""
    recorded = RECORDED["cases"][case]
    evaluation = project.report(case, "evaluation.json")
    # Figures that the version then did not have come beside them.
    base = recorded["evaluation"]["base"]
    assert {name: evaluation["base"][name] for name in base} == base
    # A perplexity is its loss once more, and off by a multiple of what that is off by.
    figures = {name: value for name, value in recorded["evaluation"]["tuned"].items() if name != "perplexity"}
    assert {name: evaluation["tuned"][name] for name in figures} == pytest.approx(figures, rel=SAME_LOSS)
    samples = read_csv(project.folder / f"data/07_model_output/{case}/evaluation_samples.csv")
    assert {row["row_id"]: row["tuned"] for row in samples} == recorded["answers"]


def test_the_stored_files_are_as_they_were_made() -> None:
    found = {
        path.relative_to(STORED / "project").as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:32]
        for path in (STORED / "project").rglob("*")
        if path.is_file()
    }
    changed = sorted(name for name, digest in RECORDED["files"].items() if found.get(name) != digest)
    assert changed == [], "a tool or a checkout has changed them; .gitattributes should keep their bytes"
    assert found.keys() == RECORDED["files"].keys()


@pytest.mark.parametrize("case", CASES)
def test_keys_are_made_of_files_and_settings_alone(case: str) -> None:
    keys = RECORDED["cases"][case]["keys"]
    facts = {
        what: read(STORED / "project" / STORES[what].format(case) / key / "manifest.json")["facts"]
        for what, key in keys.items()
    }
    rows, settings = facts["rows"], facts["splits"]["settings"]
    divided_by = {name: settings[name] for name in settings if name not in rows["settings"]}
    divided_by |= {name: settings[name] for name in ("group", "stratify", "key")}
    made_of = {
        "rows": {
            "schema_version": SCHEMA_VERSION,
            "rows_version": ROWS_VERSION,
            "raw_examples": rows["files"],
            "settings": rows["settings"],
        },
        "splits": {"schema_version": SCHEMA_VERSION, "rows": keys["rows"], "settings": divided_by},
        "tokens": facts["tokens"]["sources"],
    }
    assert facts["tokens"]["sources"] == RECORDED["cases"][case]["tokens_made_of"]
    assert {what: digest_of(values) for what, values in made_of.items()} == {what: keys[what] for what in made_of}
    text = json.dumps(made_of)
    assert '"/' not in text, "an absolute path"
    assert [name for name, version in RECORDED["made_with"].items() if f'"{version}"' in text] == []


@pytest.mark.parametrize("case", RUNS)
def test_a_stored_model_is_evaluated_as_then(project: Project, case: str) -> None:
    folders = (project.folder / f"data/06_models/{case}/tuned_model", project.store("base_evaluation", case))
    before = contents(*folders)
    project.run(case, "--pipelines=evaluate")
    assert_same_evaluation(project, case)
    assert find_changes(before, *folders) == []


@pytest.mark.parametrize("case", RUNS)
def test_a_stopped_training_goes_on_with_all_that_was_stored(project: Project, case: str) -> None:
    recorded = RECORDED["cases"][case]
    stores = [project.store(what, case) for what in STORES]
    before = contents(*stores)
    checkpoint = project.checkpoint(case)
    printed = project.run(case, train__resume="true")
    for what in ("Rows", "Splits", "Tokens"):
        assert f"{what} reused: " in printed
    for again in ("Rows checked: ", "Splits made: ", "Tokens made: ", "another version"):
        assert again not in printed
    assert find_changes(before, *stores) == []
    assert {what: read(project.store(what, case) / "current.json")["key"] for what in STORES} == recorded["keys"]

    step, num_steps = recorded["stopped_at_step"], len(recorded["losses"])
    assert step < num_steps
    assert f"Going on from {checkpoint}, step {step} of {num_steps}." in printed
    assert project.report(case, "health.json")["facts"]["resumed_from_step"] == step
    losses = project.losses(case)
    assert losses[:step] == pytest.approx(recorded["losses"][:step], rel=SAME_LOSS)
    assert losses[step:] == pytest.approx(recorded["losses"][step:], rel=SAME_LOSS)
    assert project.validation_losses(case) == pytest.approx(recorded["validation_losses"], rel=SAME_LOSS)
    tuning = read(project.folder / f"data/06_models/{case}/tuned_model/tuning.json")
    assert (tuning["finished_step"], Path(tuning["run_folder"])) == (num_steps, checkpoint.parent)
    assert_same_evaluation(project, case)


def make_tokens_older(project: Project, case: str) -> str:
    """Store the tokens as a version before would have; return their key."""
    store = project.store("tokens", case)
    key = RECORDED["cases"][case]["keys"]["tokens"]
    manifest = read(store / key / "manifest.json")
    manifest["facts"]["sources"]["tokens_version"] -= 1
    manifest["key"] = digest_of(manifest["facts"]["sources"])
    write(store / key / "manifest.json", manifest)
    (store / key).rename(store / manifest["key"])
    write(store / "current.json", {"key": manifest["key"]})
    return str(manifest["key"])


def test_tokens_of_an_older_version_are_made_again_with_a_word(project: Project) -> None:
    older, key = make_tokens_older(project, "full"), RECORDED["cases"]["full"]["keys"]["tokens"]
    store = project.store("tokens", "full")
    printed = project.run("full", "--pipelines=tokenize")
    assert f"The stored tokens in {store / older} were made by another version" in printed
    assert "Tokens made: " in printed
    assert read(store / "current.json") == {"key": key}
    made = STORED / "project" / STORES["tokens"].format("full") / key
    assert read(store / key / "summary.json") == read(made / "summary.json")
    # The report's sections on rows and splits are those of the earlier run.
    reported = read(STORED / "project/data/08_reporting/full/data_report.json")
    found = project.report("full", "data_report.json")
    assert found["tokens"].pop("markdown").count("\n") == reported["tokens"].pop("markdown").count("\n")
    assert found == reported

    marker = project.checkpoint("full") / "lm_tuning_checkpoint.json"
    facts = read(marker)
    write(marker, {**facts, "identity": {**facts["identity"], "tokens_key": older}})
    printed = project.run("full", "--pipelines=train", exit_code=2, train__resume="true")
    assert f"train.resume: {marker.parent} does not belong to this run." in printed
    assert "another token set (other rows, seed, tokenizer, data, split or tokenize parameters)" in printed
    assert f"the checkpoint has '{older}', this run '{key}'" in printed
    assert "train.resume=false to start a new run (nothing is deleted)" in printed


def test_a_store_of_another_schema_is_made_again_under_its_key(project: Project) -> None:
    key = RECORDED["cases"]["adapter"]["keys"]["splits"]
    manifest = project.store("splits", "adapter") / key / "manifest.json"
    write(manifest, {**read(manifest), "schema_version": SCHEMA_VERSION - 1})
    printed = project.run("adapter", "--pipelines=split")
    assert "Rows reused: " in printed
    assert "Splits made: " in printed
    assert read(manifest)["schema_version"] == SCHEMA_VERSION
    assert "Tokens reused: " in project.run("adapter", "--pipelines=tokenize")


def test_a_checkpoint_with_less_in_it_goes_on_all_the_same(project: Project) -> None:
    """The first checkpoints had no sources with weights, no health report and no times of the whole run."""
    marker = project.checkpoint("adapter") / "lm_tuning_checkpoint.json"
    facts = read(marker)
    for name in ("health", "health_seconds", "training_seconds", "total_seconds"):
        del facts[name]
    del facts["identity"]["weights"]
    write(marker, facts)
    project.run("adapter", "--pipelines=train", train__resume="true")
    assert project.losses("adapter") == pytest.approx(RECORDED["cases"]["adapter"]["losses"], rel=SAME_LOSS)


def test_what_no_version_can_read_is_explained(project: Project) -> None:
    marker = project.checkpoint("adapter") / "lm_tuning_checkpoint.json"
    facts = read(marker)
    write(marker, {**facts, "complete": False})
    printed = project.run("adapter", "--pipelines=train", exit_code=2, train__resume="true")
    assert f"train.resume is true, but {marker.parents[2]} holds no complete checkpoint." in printed
    tuned = project.folder / "data/06_models/adapter/tuned_model"
    write(tuned / "tuning.json", {**read(tuned / "tuning.json"), "method": "later"})
    printed = project.run("adapter", "--pipelines=evaluate", exit_code=2)
    assert f"{tuned} was tuned by the method 'later'; this version knows lora, qlora, full." in printed
