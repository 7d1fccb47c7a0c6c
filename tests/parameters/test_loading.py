from __future__ import annotations

import re
import shutil
from collections.abc import Callable

import pytest

from .conftest import Project

Problems = Callable[..., list[str]]


def test_base_alone_is_valid(project: Project) -> None:
    parameters = project.load()
    assert parameters.output == "default"
    assert parameters.train.effective_batch_tokens == 512


def test_an_overlay_changes_one_nested_key_and_keeps_its_siblings(project: Project) -> None:
    project.write("cpu/parameters.yml", {"train": {"lora": {"r": 2}, "learning_rate": 1e-3}})
    base, overlaid = project.load().train, project.load("cpu").train
    assert overlaid.lora.r == 2 and overlaid.learning_rate == 1e-3
    changed = {"lora": overlaid.lora, "learning_rate": overlaid.learning_rate}
    assert overlaid == base.model_copy(update=changed)
    assert overlaid.lora == base.lora.model_copy(update={"r": 2})


def test_runtime_parameters_lie_on_top_of_an_overlay(project: Project) -> None:
    project.write("cpu/parameters.yml", {"train": {"learning_rate": 1e-3}})
    train = project.load("cpu", train={"max_steps": 1}).train
    assert (train.max_steps, train.learning_rate, train.effective_batch_tokens) == (1, 1e-3, 512)


def test_a_problem_names_the_file_and_line_that_wins(project: Project, problems_of: Problems) -> None:
    project.write("cpu/parameters_train.yml", "train:\n  # a comment\n  max_steps: none\n")
    (problem,) = problems_of(project.load, "cpu")
    assert problem.endswith("[conf/cpu/parameters_train.yml, line 3]")
    (problem,) = problems_of(project.load, "cpu", train={"max_steps": 0})
    assert problem.endswith("[--params]")


def test_an_unknown_key_names_the_file_and_line(project: Project, problems_of: Problems) -> None:
    project.write("cpu/parameters.yml", "train:\n  lora:\n    rank: 3\n")
    assert problems_of(project.load, "cpu")[0].endswith("[conf/cpu/parameters.yml, line 3]")


@pytest.mark.parametrize(("written", "kind"), [("01", "an integer"), ("no", "a boolean"), ("1.0", "a number")])
def test_text_that_yaml_took_for_something_else_is_quoted_as_it_was_written(
    project: Project, problems_of: Problems, written: str, kind: str
) -> None:
    project.write("cpu/parameters.yml", f"model:\n  revision: {written}\n")
    (problem,) = problems_of(project.load, "cpu")
    assert f'YAML reads {written} as {kind}; for a string put it in quotes: "{written}".' in problem
    project.write("cpu/parameters.yml", f'model:\n  revision: "{written}"\n')
    assert project.load("cpu").model.revision == written


def test_scientific_notation_in_a_file_is_a_number(project: Project) -> None:
    project.write("cpu/parameters.yml", "train:\n  learning_rate: 1e-4\n")
    assert project.load("cpu").train.learning_rate == 0.0001


def test_a_missing_environment_names_those_that_exist(project: Project, problems_of: Problems) -> None:
    project.write("cpu/parameters.yml", {})
    (problem,) = problems_of(project.load, "gpu")
    assert problem == ("There is no environment 'gpu': the folder conf/gpu is missing. Environments here: cpu, local.")


def test_a_missing_local_folder_says_how_to_make_it(project: Project, problems_of: Problems) -> None:
    shutil.rmtree(project.root / "conf" / "local")
    assert problems_of(project.load) == ["The folder conf/local is missing. It may be empty: mkdir -p conf/local"]


def test_a_file_that_is_not_yaml_names_file_and_line(project: Project, problems_of: Problems) -> None:
    project.write("cpu/parameters.yml", "train:\n  max_steps: [1\n  seed: 2\n")
    (problem,) = problems_of(project.load, "cpu")
    assert re.fullmatch(
        r"conf/cpu/parameters.yml, line 3, column \d cannot be read as YAML: .*expected ',' .*", problem
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"seed: 1\ntrain:\n  max_steps: 3\n  max_steps: 4\n",
            "line 4, column 3 cannot be read as YAML: found duplicate key max_steps. Keep one of the two.",
        ),
        (
            b"train:\n\tmax_steps: 3\n",
            "line 2, column 1 cannot be read as YAML: a tab where spaces are wanted. Indent with spaces.",
        ),
        (b"seed: 1\noutput: \xff\n", "line 2 cannot be read as YAML: it is not UTF-8. Save it as UTF-8."),
        (
            b"seed: 1\noutput: a\x00b\n",
            "line 2, column 10 cannot be read as YAML: the character U+0000 is not allowed.",
        ),
    ],
)
@pytest.mark.parametrize("name", ["base/parameters_more.yml", "cpu/parameters.yml"])
def test_a_file_that_cannot_be_read_is_named_once_with_one_line(
    project: Project, problems_of: Problems, name: str, content: bytes, message: str
) -> None:
    project.write("cpu/parameters.yml", {})
    (project.root / "conf" / name).write_bytes(content)
    assert problems_of(project.load, "cpu") == [f"conf/{name}, {message}"]


def test_a_file_that_holds_a_list_is_refused(project: Project, problems_of: Problems) -> None:
    project.write("cpu/parameters.yml", "- train\n")
    assert problems_of(project.load, "cpu") == [
        "The parameters cannot be read: the top level of a file must be keys with values."
    ]


def test_a_key_twice_in_one_file_is_refused(project: Project, problems_of: Problems) -> None:
    project.write("cpu/parameters.yml", "train:\n  max_steps: 3\n  max_steps: 4\n")
    (problem,) = problems_of(project.load, "cpu")
    assert "duplicate key max_steps" in problem and "line 3" in problem


def test_an_empty_overlay_changes_nothing(project: Project) -> None:
    project.write("cpu/parameters.yml", "# nothing yet\n")
    assert project.load("cpu") == project.load()


def test_a_group_whose_keys_are_all_commented_out_is_named(project: Project, problems_of: Problems) -> None:
    project.write("cpu/parameters.yml", "train:\n  # max_steps: 3\n")
    (problem,) = problems_of(project.load, "cpu")
    assert problem.startswith("train = null (nothing) is not allowed. It takes a mapping of the keys method, lora")
    assert problem.endswith("[conf/cpu/parameters.yml, line 1]")


def test_a_key_in_two_files_of_one_environment_is_refused(project: Project, problems_of: Problems) -> None:
    project.write("cpu/parameters.yml", {"train": {"max_steps": 1}})
    project.write("cpu/parameters_train.yml", {"train": {"max_steps": 2}})
    (problem,) = problems_of(project.load, "cpu")
    assert "Duplicate keys" in problem and "train" in problem


def test_an_interpolation_of_nothing_is_explained(project: Project, problems_of: Problems) -> None:
    project.write("cpu/parameters.yml", {"data": {"template": "costs ${price}"}})
    (problem,) = problems_of(project.load, "cpu")
    assert problem.endswith("Interpolation key 'price' not found. Where ${ is meant as text, write \\${.")
    project.write("cpu/parameters.yml", {"data": {"template": "costs \\${price}"}})
    assert project.load("cpu").data.template == "costs ${price}"


def test_a_key_that_is_a_number_in_a_file_and_text_on_the_command_line_is_explained(
    project: Project, problems_of: Problems
) -> None:
    project.write("cpu/parameters.yml", "train:\n  class_weights: {0: 2.0, 1: 1.5}\n")
    (problem,) = problems_of(project.load, "cpu", train={"class_weights": {"1": 3}})
    assert problem == (
        "The parameters cannot be put together: train.class_weights.1: Conflicting integer and string keys: 1 and '1'. "
        "A number is a key of its own in YAML, and --params has keys of text only: put such keys in quotes in the "
        'file, as in "1": 2.0.'
    )


class TestOutput:
    """Parameters and catalog read the name of the result folders from different places and must agree."""

    @staticmethod
    def folder_in_catalog(project: Project, env: str | None = None, **runtime: str) -> str:
        entry = {"type": "MemoryDataset", "metadata": "${runtime_params:output, ${globals:output}}"}
        project.write("base/catalog.yml", {"probe": entry})
        return str(project.loader(env, **runtime)["catalog"]["probe"]["metadata"])

    def test_an_overlay_sets_it_in_its_globals(self, project: Project) -> None:
        project.write("cpu/globals.yml", {"output": "cpu"})
        assert project.load("cpu").output == "cpu"
        assert self.folder_in_catalog(project, "cpu") == "cpu"

    @pytest.mark.parametrize("env", [None, "cpu"])
    def test_a_runtime_parameter_changes_both(self, project: Project, env: str | None) -> None:
        project.write("cpu/globals.yml", {"output": "cpu"})
        assert project.load(env, output="other").output == "other"
        assert self.folder_in_catalog(project, env, output="other") == "other"

    def test_one_that_only_the_parameters_know_is_refused(self, project: Project, problems_of: Problems) -> None:
        project.write("cpu/parameters.yml", {"output": "cpu"})
        (problem,) = problems_of(project.load, "cpu")
        assert "output = 'cpu' in the parameters, but the catalog writes to the folders of 'default'" in problem
        assert "globals.yml (output: cpu)" in problem
        assert problem.endswith("[conf/cpu/parameters.yml, line 1]")
        assert project.load("cpu", output="both").output == "both"

    def test_the_refusal_comes_together_with_other_problems(self, project: Project, problems_of: Problems) -> None:
        project.write("cpu/parameters.yml", {"output": "cpu", "seed": -1})
        assert len(problems_of(project.load, "cpu")) == 2

    def test_a_number_in_globals_says_how_to_quote(self, project: Project, problems_of: Problems) -> None:
        project.write("cpu/globals.yml", "output: 12\n")
        (problem,) = problems_of(project.load, "cpu")
        assert 'put it in quotes: "12"' in problem
        assert problem.endswith("${globals:output}]")
