"""The split pipeline: raw files in, checked rows and three splits of them out."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from lm_tuning.pipelines import datasets, namespaced, params

from .nodes import check_examples, split_examples


def create_pipeline() -> Pipeline:
    """Wire checking and splitting."""
    return namespaced(
        "split",
        Node(
            func=check_examples,
            inputs=datasets("raw_examples", "check_cache") | params("data", "split", "task"),
            outputs=["checked_examples", "data_report"],
            name="check_examples",
        ),
        # Apart, so that the report on bad rows is stored before they end the run.
        Node(
            func=split_examples,
            inputs=datasets("checked_examples", "split_cache")
            | params("data", "split", "train", "seed", "task", "output"),
            outputs=["example_splits", "split_summary", "split_report"],
            name="split_examples",
        ),
    )
