"""The parts that refer to each other by name agree: catalog, parameters, pipelines, overlays, import rules."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from kedro.config import OmegaConfigLoader
from kedro.io import AbstractDataset, DataCatalog
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node

from lm_tuning import settings
from lm_tuning.parameters import Parameters
from lm_tuning.parameters.loading import load_parameters
from lm_tuning.parameters.schema import walk_keys
from lm_tuning.pipeline_registry import register_pipelines

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "src" / "lm_tuning"
ENVIRONMENTS = sorted(path.name for path in (REPOSITORY / "conf").iterdir() if path.is_dir() and path.name != "base")
OVERLAYS = [name for name in ENVIRONMENTS if name != "local"]
PARAMETER = "params:"


def loader(env: str) -> OmegaConfigLoader:
    return OmegaConfigLoader(conf_source=str(REPOSITORY / "conf"), env=env, **settings.CONFIG_LOADER_ARGS)


def all_nodes() -> list[Node]:
    """Every node of every registered pipeline, also of those that a plain run leaves out."""
    return sum(register_pipelines().values(), Pipeline([])).nodes


@pytest.fixture(scope="module", params=ENVIRONMENTS)
def env(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestEveryEnvironment:
    def test_parameters_are_valid(self, env: str) -> None:
        parameters = load_parameters(loader(env), REPOSITORY)
        assert isinstance(parameters, Parameters)

    def test_pipelines_find_every_input_and_output(self, env: str) -> None:
        catalog = loader(env)["catalog"]
        parameters = set(loader(env)["parameters"])
        for name, pipeline in register_pipelines().items():
            datasets = {dataset for dataset in pipeline.datasets() if not dataset.startswith(PARAMETER)}
            assert datasets <= set(catalog), (name, datasets - set(catalog))
            wanted = {item.removeprefix(PARAMETER) for item in pipeline.inputs() if item.startswith(PARAMETER)}
            assert wanted <= parameters, (name, wanted - parameters)

    def test_every_dataset_can_be_made(self, env: str) -> None:
        config = loader(env)["catalog"]
        catalog = DataCatalog.from_config(config)
        for name in config:
            assert catalog.get(name) is not None, name

    def test_results_lie_in_folders_of_the_output_name(self, env: str) -> None:
        output = load_parameters(loader(env), REPOSITORY).output
        other = OmegaConfigLoader(
            conf_source=str(REPOSITORY / "conf"),
            env=env,
            runtime_params={"output": "elsewhere"},
            **settings.CONFIG_LOADER_ARGS,
        )["catalog"]
        for name, entry in loader(env)["catalog"].items():
            if "filepath" in entry and name not in ("batch_plans", "evaluation_history"):  # which all outputs share
                assert f"/{output}/" in entry["filepath"], name
                assert other[name]["filepath"] == entry["filepath"].replace(f"/{output}/", "/elsewhere/"), name


def test_every_overlay_has_an_output_of_its_own() -> None:
    outputs = [load_parameters(loader(env), REPOSITORY).output for env in ["local", *OVERLAYS]]
    assert len(set(outputs)) == len(outputs)
    for env in OVERLAYS:
        assert "output:" in (REPOSITORY / "conf" / env / "globals.yml").read_text(), env


def test_every_catalog_entry_is_used() -> None:
    used = set().union(*(pipeline.datasets() for pipeline in register_pipelines().values()))
    assert set(loader("local")["catalog"]) <= used


def test_base_shows_every_key() -> None:
    given = loader("local")["parameters"]
    # These settings are transformers': those that are left out keep its defaults.
    for path, _ in walk_keys():
        if path[:2] == ("train", "trainer") and len(path) > 2:
            continue
        value: Any = given
        for part in path:
            assert part in value, f"conf/base has no {'.'.join(path)}"
            value = value[part]


def test_base_parameters_are_filed_by_pipeline() -> None:
    names = {path.stem for path in (REPOSITORY / "conf" / "base").glob("parameters*.yml")}
    assert names <= {"parameters", *(f"parameters_{name}" for name in register_pipelines())}


def test_the_registry_composes_as_documented() -> None:
    pipelines = register_pipelines()
    parts: dict[str, Pipeline] = {name: pipelines[name] for name in ("example_data", "tokenize", "evaluate")}
    whole = {"example_data", "split", "tokenize", "preflight", "train", "profile", "evaluate"}
    alone = {*whole, "generate", "predict", "export"}
    assert set(pipelines) == {"__default__", *alone}
    assert set(parts["example_data"].nodes) < set(pipelines["split"].nodes)
    assert set(parts["tokenize"].nodes) < set(pipelines["train"].nodes)
    assert set(pipelines["split"].nodes) | set(parts["tokenize"].nodes) < set(pipelines["preflight"].nodes)
    whole = set().union(*(pipelines[name].nodes for name in ("split", "train", "evaluate")))
    assert set(pipelines["__default__"].nodes) == whole


@pytest.mark.parametrize("node", all_nodes(), ids=lambda node: node.name)
class TestEveryNode:
    def test_it_is_named_after_its_function_within_its_pipeline(self, node: Node) -> None:
        assert node.name == f"{node.namespace}.{node.func.__name__}"
        assert node.func.__module__ == f"lm_tuning.pipelines.{node.namespace}.nodes"

    def test_its_type_hints_resolve_and_match_the_parameter_classes(self, node: Node) -> None:
        hints = get_type_hints(node.func)
        inputs = dict(zip(node.inputs, inspect.signature(node.func).parameters, strict=False))
        if isinstance(node._inputs, dict):
            inputs = {dataset: argument for argument, dataset in node._inputs.items()}
        for dataset, argument in inputs.items():
            assert argument in hints, argument
            if dataset.startswith(PARAMETER):
                wanted = Parameters.model_fields[dataset.removeprefix(PARAMETER)].annotation
                assert hints[argument] is wanted or hints[argument] in {int, str}, (argument, hints[argument])

    def test_only_heavy_nodes_are_tagged_for_the_backend(self, node: Node) -> None:
        heavy = {
            "prepare_base_model", "train_model", "profile_steps", "evaluate_models", "answer_prompts",
            "predict_classes", "export_model",
        }  # fmt: skip
        assert heavy <= {each.func.__name__ for each in all_nodes()}
        assert ("torch" in node.tags) == (node.func.__name__ in heavy)

    def test_it_says_what_it_does(self, node: Node) -> None:
        assert node.func.__doc__


def test_every_pipeline_of_the_package_is_registered() -> None:
    folders = {path.parent.name for path in (PACKAGE / "pipelines").glob("*/pipeline.py")}
    assert {node.namespace for node in all_nodes()} == folders


def test_every_dataset_class_has_a_place_on_the_package_s_face() -> None:
    from lm_tuning import datasets

    found = set()
    for path in modules("datasets"):
        module = importlib.import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
        classes = inspect.getmembers(module, inspect.isclass)
        found |= {
            name
            for name, each in classes
            if issubclass(each, AbstractDataset) and each.__module__ == module.__name__ and not inspect.isabstract(each)
        }
    assert set(datasets.__all__) == found == set(datasets.CLASSES)
    for name in found:
        assert getattr(datasets, name).__name__ == name


def test_the_catalog_names_datasets_by_the_package_s_face() -> None:
    for name, entry in loader("local")["catalog"].items():
        package, _, dataset = entry["type"].rpartition(".")
        assert (package, dataset.endswith("Dataset")) == ("lm_tuning.datasets", True), name


def test_settings_name_all_hooks() -> None:
    classes = {
        node.name
        for path in modules("hooks")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Hook")
    }
    assert {type(hook).__name__ for hook in settings.HOOKS} == classes
    assert {"EnvironmentHook", "OutputLockHook", "ParametersHook", "TrackingHook"} <= classes
    assert settings.DISABLE_HOOKS_FOR_PLUGINS == ("kedro_mlflow",)


def environment_after_settings(name: str, **shell: str) -> str:
    """Import the settings in a new process below the project folder and return an environment variable."""
    bare = {key: value for key, value in os.environ.items() if key not in {"MLFLOW_TRACKING_URI", "DO_NOT_TRACK"}}
    probe = f"import os; from lm_tuning import settings; print(os.environ[{name!r}])"
    command = [sys.executable, "-c", probe]
    done = subprocess.run(
        command, cwd=REPOSITORY / "tests", env=bare | shell, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_no_usage_data_is_sent_by_default() -> None:
    assert (REPOSITORY / ".telemetry").read_text().splitlines()[-1] == "consent: false"
    assert environment_after_settings("DO_NOT_TRACK") == "true"


def test_runs_are_tracked_in_the_project_unless_the_shell_says_otherwise() -> None:
    assert environment_after_settings("MLFLOW_TRACKING_URI") == f"sqlite:///{REPOSITORY}/mlflow.db"
    server = "http://host:5000"
    assert environment_after_settings("MLFLOW_TRACKING_URI", MLFLOW_TRACKING_URI=server) == server


def modules(*names: str) -> Iterator[Path]:
    for name in names:
        path = PACKAGE / name
        yield from path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]


def imported_at_start(path: Path) -> set[str]:
    """Name the top-level packages that importing a module imports at once; functions and type checking do not count."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
            continue
        pending.extend(ast.iter_child_nodes(node))
    return found


def test_modules_that_every_command_loads_import_nothing_heavy() -> None:
    light = ["settings", "cli", "pipeline_registry", "errors", "parameters", "hooks", "pipelines", "datasets"]
    paths = list(modules(*light, "storage", "data", "progress"))
    assert len(paths) > 20
    heavy = {"torch", "transformers", "datasets", "peft", "accelerate", "bitsandbytes"}
    assert {path.name: imported_at_start(path) & heavy for path in paths if imported_at_start(path) & heavy} == {}


def test_the_import_rules_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "5 kept, 0 broken" in done.stdout


def test_no_imports_go_in_a_circle() -> None:
    """Also none inside functions or for types, between modules or packages."""
    command = [sys.executable, "benchmarks/code_size.py", "--json"]
    counts = json.loads(subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout)
    (found,) = counts.values()
    assert found["files"] > 100
    assert not any(found["circles"].values()), found["circles"]
    assert found["files_over_400_lines"] == 0


def test_names_of_tests_stay_readable() -> None:
    names = [
        node.name
        for path in (REPOSITORY / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert len(names) > 1000
    assert [name for name in names if len(name) >= 80] == []
