"""What Kedro-Viz draws: a main line, with the reports of each pipeline beside its product."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from kedro.pipeline import Pipeline

from lm_tuning.pipeline_registry import register_pipelines

ROOT = Path(__file__).parents[1]
ROWS = ["raw", "intermediate", "model_input", "models", "model_output"]
MAIN_LINE = ["raw_examples", "example_splits", "tokenized_examples", "tuned_model", "evaluation"]


@pytest.fixture(scope="module")
def layers() -> dict[str, str]:
    catalog = yaml.safe_load((ROOT / "conf/base/catalog.yml").read_text(encoding="utf-8"))
    entries = {name: entry for name, entry in catalog.items() if not name.startswith("_")}
    return {name: entry["metadata"]["kedro-viz"]["layer"] for name, entry in entries.items()}


def boxes() -> dict[str, Pipeline]:
    """The pipelines that are drawn first, by their names."""
    whole = register_pipelines()["__default__"]
    names = {str(node.namespace) for node in whole.nodes}
    return {name: whole.only_nodes_with_namespaces([name]) for name in names}


def test_the_main_line_has_a_row_for_each_step(layers: dict[str, str]) -> None:
    assert [layers[name] for name in MAIN_LINE] == ROWS


def test_what_a_pipeline_writes_lies_in_one_row(layers: dict[str, str]) -> None:
    rows = {name: {layers[output] for output in box.outputs()} for name, box in boxes().items()}
    assert all(len(row) == 1 for row in rows.values()), rows


def test_what_a_pipeline_needs_besides_lies_in_the_row_above_it(layers: dict[str, str]) -> None:
    """Otherwise each of these would make a row of its own, and the graph is drawn too small to be read."""
    made = set().union(*(box.outputs() for box in boxes().values()))
    for name, box in boxes().items():
        inputs = {each for each in box.inputs() if each in layers}
        if inputs & made:
            above = max(ROWS.index(layers[each]) for each in inputs & made)
            assert {layers[each] for each in inputs - made} <= {ROWS[above]}, name


@pytest.mark.parametrize("imported_before", [False, True], ids=["settings first", "page first"])
def test_no_banner_speaks_of_a_later_version(imported_before: bool) -> None:
    """Without a connection Kedro-Viz takes "None" for a later version of itself."""
    page = "from kedro_viz.api.rest.responses import version"
    script = f"""
import json, requests
def refuse(*_, **__):
    raise requests.exceptions.ConnectionError("offline")
requests.get = refuse
import kedro_viz.server
{page if imported_before else ""}
import lm_tuning.settings
{page}
answer = version.get_version_response()
print(json.dumps([answer.installed, answer.is_outdated, answer.latest]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    installed, is_outdated, latest = json.loads(done.stdout.splitlines()[-1])
    assert not is_outdated
    assert latest == installed


def test_a_run_imports_nothing_of_the_page() -> None:
    script = "import sys, lm_tuning.settings; print('kedro_viz.integrations.pypi' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "False"
