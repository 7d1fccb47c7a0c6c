from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner
from kedro.config import MissingConfigException, OmegaConfigLoader
from kedro.framework.cli.project import run as kedro_run
from kedro.framework.project import configure_project
from kedro.io import DatasetError
from kedro.validation.exceptions import ParameterValidationError

from lm_tuning import cli
from lm_tuning.errors import GateNotReached, Interrupted, UserError
from lm_tuning.parameters import trainer_arguments
from tests.support.shell import Shell

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project of its own: what a run leaves behind stays in it."""
    for name in ("pyproject.toml", ".telemetry"):
        shutil.copy(REPOSITORY / name, tmp_path)
    shutil.copytree(REPOSITORY / "conf", tmp_path / "conf", ignore=shutil.ignore_patterns("*local*"))
    (tmp_path / "conf" / "local").mkdir()
    shutil.copytree(REPOSITORY / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return tmp_path


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A process that has imported nothing heavy, as long as no command does."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW_", "KEDRO_"))}
    with Shell(tmp_path_factory.mktemp("shell"), environment | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}) as shell:
        yield shell


def test_listing_the_pipelines_loads_nothing_heavy(shell: Shell, folder: Path) -> None:
    done = shell.kedro(folder, "registry", "list")
    assert done.code == 0
    assert yaml.safe_load(done.stdout) == [
        "__default__",
        "evaluate",
        "example_data",
        "export",
        "generate",
        "predict",
        "preflight",
        "profile",
        "split",
        "tokenize",
        "train",
    ]
    assert done.loaded == []


def test_a_parameter_error_prints_the_problems_alone_and_loads_nothing_heavy(shell: Shell, folder: Path) -> None:
    parameters = "train.max_steps=0,train.lora.rank=3,model.trust_remote_code=maybe"
    done = shell.kedro(folder, "run", "--pipeline=split", f"--params={parameters}")
    assert done.code == 2
    assert done.stderr.splitlines() == [
        "model.trust_remote_code = 'maybe' (a string) is not allowed. It takes true or false. [--params]",
        "train.lora.rank: there is no such key. Did you mean train.lora.r? [--params]",
        "train.max_steps = 0 (an integer) is not allowed. It takes an integer of at least 1, or null. [--params]",
        "(traceback: logs/errors.log)",
    ]
    assert "Traceback" not in done.stdout
    assert done.loaded == []
    log = (folder / "logs" / "errors.log").read_text()
    assert "Traceback (most recent call last)" in log and f"run --pipeline=split --params={parameters}" in log
    assert not (folder / "data").exists() and not (folder / "mlflow.db").exists()


def test_a_mistake_found_in_a_node_is_printed_once_and_loads_nothing_heavy(shell: Shell, folder: Path) -> None:
    done = shell.kedro(folder, "run", "--pipeline=example_data", "--params=data.path=rows/missing.jsonl")
    assert done.code == 2, done
    output = done.stdout + done.stderr
    assert "missing.jsonl" in done.stderr
    assert "Traceback (most" not in output and "failed with error" not in output and "deprecated" not in output
    assert done.loaded == []


def test_a_mistyped_environment_is_named(shell: Shell, folder: Path) -> None:
    done = shell.kedro(folder, "run", "--env=smok")
    assert done.code == 2
    assert done.stderr.startswith("There is no environment 'smok': the folder conf/smok is missing.")
    assert "smoke" in done.stderr


@pytest.fixture
def configured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    configure_project("lm_tuning")
    return folder


def invoke(command: click.Command, *arguments: str, **options: Any) -> Any:
    return CliRunner().invoke(command, arguments, catch_exceptions=False, **options)


def test_run_has_every_option_of_kedros_own() -> None:
    assert [option.opts for option in cli.run.params] == [option.opts for option in kedro_run.params]


@pytest.mark.parametrize("spelling", ["--pipeline", "--pipelines"])
def test_both_spellings_name_a_pipeline_without_a_warning(
    configured: Path, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(kedro_run, "callback", lambda **options: given.update(options))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = invoke(cli.run, f"{spelling}=train", "--params=model.revision=01", "--tags=torch")
    assert result.exit_code == 0, result.output
    assert given["pipelines"] == ["train"] and given["pipeline"] is None
    assert given["params"] == {"model": {"revision": "01"}}
    assert given["tags"] == ["torch"]


def test_mistyped_pipelines_are_all_named(configured: Path) -> None:
    result = invoke(cli.run, "--pipelines=trian,split,evalute")
    assert result.exit_code == 2
    assert "There is no pipeline 'trian'." in result.stderr and "There is no pipeline 'evalute'." in result.stderr
    known = "evaluate, example_data, export, generate, predict, preflight, profile, split, tokenize, train"
    assert f"Pipelines: {known}." in result.stderr


def test_both_spellings_together_are_refused(configured: Path) -> None:
    result = invoke(cli.run, "--pipelines=train", "--pipeline=split")
    assert result.exit_code == 2
    assert "Give --pipelines or --pipeline" in result.stderr


def test_parameters_that_cannot_be_read_are_a_usage_error(configured: Path) -> None:
    result = invoke(cli.run, "--params=train.max_steps")
    assert result.exit_code == 2
    assert "'train.max_steps' is not of the form key=value" in result.stderr


def test_a_configuration_file_gives_parameters_too(configured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(kedro_run, "callback", lambda **options: given.update(options))
    Path("run.yml").write_text(yaml.safe_dump({"run": {"pipelines": "split", "params": {"seed": 7}}}))
    assert invoke(cli.run, "--config=run.yml").exit_code == 0
    assert given["params"] == {"seed": 7} and given["pipelines"] == ["split"]


def raising(error: BaseException) -> click.Command:
    @click.command()
    @cli.explain_errors
    def fail() -> None:
        raise error

    return fail


def caused_by(outer: Exception, cause: Exception) -> Exception:
    outer.__cause__ = cause
    return outer


@pytest.mark.parametrize(
    "error",
    [
        UserError(["row 3 is bad", "row 4 is bad"]),
        caused_by(DatasetError("Failed while saving"), UserError(["row 3 is bad", "row 4 is bad"])),
        caused_by(RuntimeError("x"), caused_by(DatasetError("y"), UserError(["row 3 is bad", "row 4 is bad"]))),
        ParameterValidationError("row 3 is bad\nrow 4 is bad"),
        MissingConfigException("row 3 is bad\nrow 4 is bad"),
        yaml.YAMLError("row 3 is bad\nrow 4 is bad"),
    ],
)
def test_a_user_error_is_found_however_it_was_wrapped(configured: Path, error: Exception) -> None:
    result = invoke(raising(error))
    assert result.exit_code == 2
    assert result.stderr.splitlines() == ["row 3 is bad", "row 4 is bad", f"(traceback: {cli.ERROR_LOG})"]
    assert "row 3 is bad" in (configured / cli.ERROR_LOG).read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: 1\na: 2\n", "line 2, column 1: found duplicate key a. Keep one of the two."),
        (
            b"a:\n\tb: 2\n",
            "line 2, column 1: a tab where spaces are wanted. Indent with spaces.",
        ),
        (b"a: \xff\n", "line 1: it is not UTF-8. Save it as UTF-8."),
    ],
)
@pytest.mark.parametrize("name", ["globals", "catalog"])
def test_a_configuration_file_that_cannot_be_read_is_named_once(
    configured: Path, name: str, content: bytes, message: str
) -> None:
    file = configured / "conf" / "base" / f"{name}_more.yml"
    file.write_bytes(content)
    with pytest.raises(ValueError if b"\xff" in content else yaml.YAMLError) as caught:
        loader = OmegaConfigLoader(str(configured / "conf"), base_env="base", default_run_env="base")
        loader.config_patterns["globals"] = ["globals*"]
        loader[name]
    result = invoke(raising(caught.value))
    assert result.exit_code == 2
    index, reason = message.split(": ", 1)
    assert result.stderr.splitlines()[0] == f"conf/base/{name}_more.yml, {index} cannot be read as YAML: {reason}"


def test_problems_are_red(configured: Path) -> None:
    result = CliRunner().invoke(raising(UserError("row 3 is bad")), color=True)
    assert "\x1b[31mrow 3 is bad\x1b[0m" in result.stderr


def test_the_error_log_lies_in_the_project_and_keeps_earlier_errors(
    configured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    invoke(raising(UserError("the first")))
    monkeypatch.chdir(configured / "conf")
    result = invoke(raising(UserError("the second")))
    assert result.stderr.splitlines()[-1] == "(traceback: ../logs/errors.log)"
    log = (configured / cli.ERROR_LOG).read_text()
    assert "the first" in log and "the second" in log


def test_an_error_log_that_cannot_be_written_does_not_hide_the_problem(configured: Path) -> None:
    (configured / "logs").write_text("a file where the folder should be")
    result = invoke(raising(UserError("row 3 is bad")))
    assert result.exit_code == 2
    assert result.stderr.startswith("row 3 is bad\n(traceback: not kept, ")


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (
            Interrupted("SIGINT", "Go on with train.resume=true."),
            130,
            "Stopped by SIGINT. Go on with train.resume=true.",
        ),
        (Interrupted("SIGTERM"), 143, "Stopped by SIGTERM."),
        (caused_by(DatasetError("x"), Interrupted("SIGTERM")), 143, "Stopped by SIGTERM."),
        (KeyboardInterrupt(), 130, "Stopped by SIGINT."),
    ],
)
def test_a_stopped_run_says_so_and_has_the_exit_code_of_its_signal(
    configured: Path, error: BaseException, code: int, text: str
) -> None:
    result = invoke(raising(error))
    assert (result.exit_code, result.stderr) == (code, f"{text}\n")
    assert not (configured / cli.ERROR_LOG).exists()


def test_a_missed_gate_says_what_is_missed_and_has_exit_code_3(configured: Path) -> None:
    missed = ["evaluate.gate.rouge_l not reached: ROUGE-L is 0.2, at least 0.3 is asked for.", "A second one."]
    result = invoke(raising(GateNotReached(missed)))
    kept = "All results are kept, and the run in MLflow is finished."
    assert (result.exit_code, result.stderr.splitlines()) == (3, [*missed, kept])
    assert not (configured / cli.ERROR_LOG).exists()
    copied = pickle.loads(pickle.dumps(GateNotReached(missed)))
    assert copied.missed == missed


def test_other_errors_keep_their_traceback(configured: Path) -> None:
    with pytest.raises(RuntimeError, match="boom"):
        invoke(raising(RuntimeError("boom")))
    result = CliRunner().invoke(raising(RuntimeError("boom")))
    assert result.exit_code == 1 and result.stderr == ""


def test_a_user_error_that_was_only_on_the_way_does_not_count(configured: Path) -> None:
    error = RuntimeError("while handling another error")
    error.__context__ = UserError("row 3 is bad")
    with pytest.raises(RuntimeError, match="while handling"):
        invoke(raising(error))


def test_parameters_are_printed_as_a_run_would_get_them(configured: Path) -> None:
    obj = SimpleNamespace(project_path=configured)
    result = invoke(cli.parameters, "--env=smoke", "--params=train.max_steps=3,model.revision=01", obj=obj)
    assert result.exit_code == 0, result.output
    printed = yaml.safe_load(result.stdout)
    assert printed["output"] == "smoke"
    assert printed["train"]["max_steps"] == 3
    assert printed["model"]["revision"] == "01"
    assert printed["tokenize"]["truncation"] == "truncate_prompt"
    refused = invoke(cli.parameters, "--params=sed=3", obj=obj)
    assert refused.exit_code == 2 and "Did you mean seed?" in refused.stderr


def test_schema_writes_both_files_and_check_finds_old_ones(configured: Path) -> None:
    obj = SimpleNamespace(project_path=configured, source_dir=configured / "src")
    missing = invoke(cli.schema, "--check", obj=obj)
    assert missing.exit_code == 2 and missing.stderr.count("is out of date. Write it again: kedro schema") == 2
    assert invoke(cli.schema, obj=obj).exit_code == 0
    for name in ("parameters.schema.json", "parameters.md"):
        written = (configured / "docs" / "reference" / name).read_text()
        assert written == (REPOSITORY / "docs" / "reference" / name).read_text()
    assert invoke(cli.schema, "--check", obj=obj).exit_code == 0
    (configured / "docs" / "reference" / "parameters.md").write_text("old")
    assert "parameters.md is out of date" in invoke(cli.schema, "--check", obj=obj).stderr


def test_schema_reads_transformers_for_the_sources_alone(configured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    obj = SimpleNamespace(project_path=configured, source_dir=configured / "src")
    for folder, is_written in {".venv/lib": False, "src": True}.items():
        table = configured / folder / "lm_tuning" / "parameters" / trainer_arguments.TABLE_FILE.name
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text("old")
        monkeypatch.setattr(trainer_arguments, "TABLE_FILE", table)
        result = invoke(cli.schema, obj=obj)
        assert (f"wrote {table}" in result.stdout, table.read_text() != "old") == (is_written, is_written)


def test_the_package_runs_as_a_module(folder: Path) -> None:
    command = [sys.executable, "-m", "lm_tuning", "--params=train.max_steps=0"]
    done = subprocess.run(command, cwd=folder, env=os.environ | {"COLUMNS": "200"}, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("train.max_steps = 0 (an integer) is not allowed.")
