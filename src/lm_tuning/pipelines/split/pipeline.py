"""The split pipeline: raw files in, checked rows and three splits of them out."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from .nodes import check_examples, split_examples


def create_pipeline() -> Pipeline:
    """Wire checking and splitting."""
    return Pipeline(
        [
            Node(
                func=check_examples,
                inputs={
                    "raw_examples": "raw_examples",
                    "check_cache": "check_cache",
                    "data": "params:data",
                    "split": "params:split",
                    "task": "params:task",
                },
                outputs=["checked_examples", "data_report"],
                name="check_examples",
            ),
            Node(
                func=split_examples,
                inputs={
                    "checked_examples": "checked_examples",
                    "split_cache": "split_cache",
                    "data": "params:data",
                    "split": "params:split",
                    "train": "params:train",
                    "seed": "params:seed",
                    "task": "params:task",
                    "output": "params:output",
                },
                outputs=["example_splits", "split_summary", "split_report"],
                name="split_examples",
            ),
        ],
        namespace="split",
        prefix_datasets_with_namespace=False,
    )
