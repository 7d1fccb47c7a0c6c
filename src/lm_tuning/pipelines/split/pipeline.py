"""The split pipeline: raw files in, three splits of checked rows out."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from .nodes import split_examples


def create_pipeline() -> Pipeline:
    """Wire splitting."""
    return Pipeline(
        [
            Node(
                func=split_examples,
                inputs={
                    "raw_examples": "raw_examples",
                    "split_cache": "split_cache",
                    "data": "params:data",
                    "split": "params:split",
                    "seed": "params:seed",
                    "task": "params:task",
                },
                outputs=["example_splits", "split_summary"],
                name="split_examples",
            ),
        ],
        namespace="split",
        prefix_datasets_with_namespace=False,
    )
