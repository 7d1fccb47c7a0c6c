"""The example-data pipeline: parameters in, a description of the raw files out."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from lm_tuning.pipelines import namespaced, params

from .nodes import prepare_raw_examples


def create_pipeline() -> Pipeline:
    """Wire the preparation of the raw files."""
    return namespaced(
        "example_data",
        Node(func=prepare_raw_examples, inputs=params("data"), outputs="raw_examples", name="prepare_raw_examples"),
    )
