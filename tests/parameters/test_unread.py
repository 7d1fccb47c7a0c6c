"""Files and keys that nobody reads are named, and the nearer of two settings wins."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lm_tuning.parameters.loading import parse_parameters, read_settled
from tests.parameters.conftest import Project

Problems = Callable[..., list[str]]


class TestFiles:
    @pytest.mark.parametrize(
        ("name", "meant"),
        [
            ("paramters.yml", "parameters.yml"),
            ("paramters_train.yml", "parameters_train.yml"),
            ("Parameter.yaml", "parameters.yml"),
            ("global.yml", "globals.yml"),
            ("globals.yaml", "globals.yml"),
            ("sub/globals.yml", "globals.yml"),
            ("mlfow.yml", "mlflow.yml"),
            ("parameters.txt", "parameters.yml"),
            ("parameters", "parameters.yml"),
            ("parameters_x.YML", "parameters.yml"),
            ("catalog.toml", "catalog.yml"),
            ("parameters.jsonc", "parameters.yml"),
        ],
    )
    def test_a_mistyped_file_is_named_with_the_nearest(
        self, project: Project, problems_of: Problems, name: str, meant: str
    ) -> None:
        project.write(f"x/{name}", "train: {max_steps: 3}\n")
        (problem,) = problems_of(project.load, "x")
        assert problem == f"conf/x/{name} is read by nothing, so what it sets is left out. Did you mean {meant}?"

    def test_a_logging_file_belongs_elsewhere(self, project: Project, problems_of: Problems) -> None:
        project.write("x/logging.yml", "version: 1\n")
        (problem,) = problems_of(project.load, "x")
        assert "Kedro reads conf/logging.yml" in problem

    def test_a_file_beside_the_environments_is_named(self, project: Project, problems_of: Problems) -> None:
        project.write("parameters.yml", "train: {max_steps: 3}\n")
        (problem,) = problems_of(project.load)
        assert problem.startswith("conf/parameters.yml is read by nothing")
        assert "conf/base/parameters.yml" in problem

    @pytest.mark.parametrize(
        "name",
        [
            "README.md",
            ".gitkeep",
            "parameters.yml~",
            ".parameters.yml.swp",
            "parameters.yml.bak",
            "service-account.json",
            "parameters/train.yml",
            "catalog_extra.yml",
            "credentials.yml",
        ],
    )
    def test_notes_copies_and_files_that_are_read_pass(self, project: Project, name: str) -> None:
        project.write(f"x/{name}", "{}\n")
        assert read_settled(project.loader("x"), project.root).warnings == []

    def test_an_unknown_yaml_file_is_a_warning(self, project: Project) -> None:
        project.write("x/spark.yml", "{}\n")
        (warning,) = read_settled(project.loader("x"), project.root).warnings
        assert warning.startswith("conf/x/spark.yml is read by nothing")

    def test_own_settings_that_an_environment_shuts_out_are_told(self, project: Project) -> None:
        project.write("local/parameters.yml", "seed: 7\n")
        project.write("x/parameters.yml", "{}\n")
        (warning,) = read_settled(project.loader("x"), project.root).warnings
        assert warning == "conf/local is not read, since --env reads another folder instead."
        assert read_settled(project.loader(), project.root).parameters.seed == 7

    def test_other_environments_are_let_be(self, project: Project) -> None:
        project.write("y/paramters.yml", "{}\n")
        assert project.load().output == "default"


class TestGlobals:
    def test_a_mistyped_key_is_named_with_the_nearest(self, project: Project, problems_of: Problems) -> None:
        project.write("x/globals.yml", "outptu: x\n")
        (problem,) = problems_of(project.load, "x")
        assert "globals.yml sets outptu" in problem
        assert problem.endswith("Did you mean output? [conf/x/globals.yml]")

    def test_a_key_that_a_file_refers_to_is_read(self, project: Project) -> None:
        project.write("x/globals.yml", "output: x\nrows: 7\n_note: unused\n")
        project.write("x/parameters.yml", "train:\n  max_steps: ${globals:rows}\n")
        parameters = project.load("x")
        assert (parameters.output, parameters.train.max_steps) == ("x", 7)


class TestNearerLayer:
    def test_the_command_line_replaces_what_a_file_sets(self, project: Project) -> None:
        settled = read_settled(project.loader(train={"effective_batch_rows": 8}), project.root)
        train = settled.parameters.train
        assert (train.effective_batch_rows, train.effective_batch_tokens) == (8, None)
        assert settled.raw["train"]["effective_batch_tokens"] is None
        (line,) = settled.replaced
        assert line.startswith("train.effective_batch_rows = 8 (--params) takes the place of ")
        assert "train.effective_batch_tokens = 512 (conf/base/parameters_train.yml, line " in line

    def test_an_overlay_replaces_what_base_sets_and_is_replaced_in_turn(self, project: Project) -> None:
        project.write("x/parameters.yml", "train: {effective_batch_rows: 4}\n")
        assert project.load("x").train.effective_batch_tokens is None
        train = project.load("x", train={"effective_batch_tokens": 1024}).train
        assert (train.effective_batch_rows, train.effective_batch_tokens) == (None, 1024)

    def test_columns_of_another_format_are_replaced_together(self, project: Project) -> None:
        project.write("x/parameters.yml", "data: {columns: {prompt: question, response: answer}}\n")
        columns = project.load("x", data={"columns": {"text": "body"}}).data.columns
        assert (columns.text, columns.prompt, columns.response) == ("body", None, None)

    def test_both_in_one_layer_is_a_contradiction(self, project: Project, problems_of: Problems) -> None:
        both = {"effective_batch_rows": 8, "effective_batch_tokens": 512}
        (problem,) = problems_of(project.load, train=both)
        assert "are both set" in problem

    def test_what_is_set_to_null_by_hand_replaces_nothing(self, project: Project) -> None:
        settled = read_settled(
            project.loader(train={"effective_batch_rows": 8, "effective_batch_tokens": None}), project.root
        )
        assert settled.replaced == []


class TestNumbers:
    @pytest.mark.parametrize(("written", "read"), [("010", "8"), ("0x10", "16"), ("1:30", "90"), ("0b11", "3")])
    def test_another_base_than_ten_is_refused(
        self, project: Project, problems_of: Problems, written: str, read: str
    ) -> None:
        project.write("x/parameters.yml", f"train:\n  max_steps: {written}\n")
        (problem,) = problems_of(project.load, "x")
        assert problem.startswith(f"train.max_steps = {written}: YAML reads {written} as {read}")
        assert problem.endswith("[conf/x/parameters.yml, line 2]")
        with pytest.raises(ValueError, match=f"YAML reads {written} as {read}"):
            parse_parameters(f"train.max_steps={written}")

    def test_a_setting_of_transformers_is_looked_at_too(self, project: Project, problems_of: Problems) -> None:
        project.write("x/parameters.yml", "train:\n  trainer:\n    warmup_steps: 010\n")
        (problem,) = problems_of(project.load, "x")
        assert "train.trainer.warmup_steps = 010" in problem

    @pytest.mark.parametrize("written", ["10", "1_000", "0", "1e-3", "0.5", "-1"])
    def test_ordinary_numbers_pass(self, project: Project, written: str) -> None:
        project.write("x/parameters.yml", f"environment:\n  variables:\n    A: '{written}'\n")
        project.load("x")
        parse_parameters(f"train.trainer.some={written}")


@pytest.mark.parametrize("name", ["base", "Batch_Plans", "mlflow", "nul", "com1.old", "a."])
def test_an_output_that_stands_for_something_else_is_refused(
    project: Project, problems_of: Problems, name: str
) -> None:
    problems = problems_of(project.load, output=name)
    assert len(problems) == 1
    assert problems[0].startswith(f"output = '{name}': ")
    assert "take another name" in problems[0]
