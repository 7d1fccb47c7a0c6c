"""The shipped catalog: every entry is ours, has its layer, follows the output name, and previews where viz shows it."""

from __future__ import annotations

from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from kedro.config import OmegaConfigLoader
from kedro.io import DataCatalog
from kedro.pipeline import Pipeline

from lm_tuning.pipeline_registry import register_pipelines

ROOT = Path(__file__).parents[2]
LAYERS = {"raw", "intermediate", "model_input", "models", "model_output", "reporting"}


def load_entries(**runtime: Any) -> dict[str, dict[str, Any]]:
    loader = OmegaConfigLoader(
        str(ROOT / "conf"), base_env="base", default_run_env="base", runtime_params=runtime or None
    )
    return {name: entry for name, entry in loader["catalog"].items() if not name.startswith("_")}


@pytest.fixture(scope="module")
def entries() -> dict[str, dict[str, Any]]:
    return load_entries()


def test_every_entry_is_one_of_ours_with_a_layer(entries: dict[str, dict[str, Any]]) -> None:
    catalog = DataCatalog.from_config(entries)
    assert set(catalog.keys()) == set(entries)
    for name, dataset in catalog.items():
        assert type(dataset).__module__.startswith("lm_tuning.datasets."), name
        assert dataset.metadata["kedro-viz"]["layer"] in LAYERS, name


@pytest.mark.parametrize(
    ("pipeline", "rows"),
    [
        ("__default__", ["raw", "intermediate", "model_input", "models", "model_output"]),
        ("preflight", ["raw", "intermediate", "model_input", "reporting"]),
        ("profile", ["intermediate", "model_input", "reporting"]),
    ],
)
def test_layers_follow_the_graph_without_a_circle(
    entries: dict[str, dict[str, Any]], pipeline: str, rows: list[str]
) -> None:
    """Kedro viz draws no layers at all when two depend on each other, also across a box."""
    layers = {name: entry["metadata"]["kedro-viz"]["layer"] for name, entry in entries.items()}
    before: dict[str, set[str]] = {layer: set() for layer in LAYERS}
    graph = register_pipelines()[pipeline]
    boxes = [graph.filter(node_namespaces=[str(node.namespace)]) for node in graph.nodes]
    for part in [*boxes, *(Pipeline([node]) for node in graph.nodes)]:
        for output in part.all_outputs():
            before[layers[output]] |= {layers[name] for name in part.inputs() if name in layers}
    for layer, others in before.items():
        others.discard(layer)
    order = list(TopologicalSorter(before).static_order())
    assert [layer for layer in order if layer in rows] == rows


def test_results_lie_in_folders_of_the_output(entries: dict[str, dict[str, Any]]) -> None:
    other = load_entries(output="other")
    for name, entry in entries.items():
        if name == "batch_plans":  # measured once for all outputs: a plan belongs to a model, a method and a card
            assert other[name]["filepath"] == entry["filepath"]
        elif "filepath" in entry:
            assert entry["filepath"].split("/")[2] == "default", name
            assert other[name]["filepath"] == entry["filepath"].replace("/default/", "/other/"), name


def test_each_file_has_one_entry_that_writes_it(entries: dict[str, dict[str, Any]]) -> None:
    paths = [
        (entry["filepath"], entry.get("section"))
        for entry in entries.values()
        if "filepath" in entry and not entry["type"].endswith(("FolderStoreDataset", "LiveReportDataset"))
    ]
    assert len(paths) == len(set(paths))


@pytest.mark.parametrize(
    ("cache", "published"),
    [
        ("check_cache", "checked_examples"),
        ("split_cache", "example_splits"),
        ("token_cache", "tokenized_examples"),
        ("base_evaluation_cache", "base_evaluation"),
    ],
)
def test_a_cache_and_what_is_published_are_one_store(
    entries: dict[str, dict[str, Any]], cache: str, published: str
) -> None:
    assert entries[cache]["filepath"] == entries[published]["filepath"]
    assert entries[cache]["keep"] == entries[published]["keep"]


def test_every_report_goes_to_mlflow(entries: dict[str, dict[str, Any]]) -> None:
    reports = {
        name
        for name, entry in entries.items()
        if "/08_reporting/" in entry.get("filepath", "")
        # Written past the catalog, and the folder that all reports lie in.
        and not entry["type"].endswith(("LiveReportDataset", ".FolderDataset"))
    }
    kept = {name for name, entry in entries.items() if entry["metadata"].get("lm_tuning", {}).get("mlflow_artifact")}
    assert kept == reports | {"evaluation_samples", "tuned_model"}
    assert entries["evaluation"]["metadata"]["lm_tuning"]["mlflow_metrics"] is True


def test_kedro_viz_shows_previews_of_the_shipped_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kedro_viz.models.flowchart.node_metadata import DataNodeMetadata
    from kedro_viz.models.flowchart.nodes import GraphNode
    from matplotlib.figure import Figure

    monkeypatch.chdir(tmp_path)
    catalog = DataCatalog.from_config(load_entries())
    for dataset in catalog.values():  # before the first run there is nothing to show, and no warning about it
        assert not hasattr(dataset, "preview") or dataset.preview() is None
    figure = Figure()
    figure.subplots().plot([1, 2])
    store = catalog.load("token_cache")
    staged = store.stage("k1")
    (staged.path / "preview.json").write_text('{"columns": ["prompt"], "data": [["a"], ["b"]]}')
    content = {
        "loss_curve": figure,
        "training_summary": [{"step": 1, "loss": 2.0}],
        "evaluation": {"base": {"nats_per_token": 3.5}},
        "evaluation_report": "# Report",
        "tokenized_examples": staged,
    }
    kinds = {
        "loss_curve": "ImagePreview",
        "training_summary": "TablePreview",
        "evaluation": "JSONPreview",
        "evaluation_report": "HTMLPreview",
        "tokenized_examples": "TablePreview",
    }
    for name, value in content.items():
        catalog.save(name, value)
        node = GraphNode.create_data_node(
            dataset_id=name,
            dataset_name=name,
            layer="reporting",
            tags=set(),
            dataset=catalog[name],
            modular_pipelines=set(),
        )
        shown = DataNodeMetadata(data_node=node)
        assert shown.preview_type == kinds[name]
        assert shown.preview, name
