"""The preflight pipeline: tokens and what is known of them in, one report in three forms out."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from lm_tuning.pipelines import datasets, namespaced, params

from .nodes import inspect_examples


def create_pipeline() -> Pipeline:
    """Wire preflight."""
    return namespaced(
        "preflight",
        Node(
            func=inspect_examples,
            inputs=datasets("tokenized_examples", "example_splits", "base_model", "token_summary", "split_summary")
            # All sections of the data report, so that a run of several pipelines writes them first.
            | datasets("data_report", "split_report", "token_report")
            | params("model", "tokenize", "train", "preflight", "seed"),
            outputs=["preflight", "preflight_report", "preflight_page"],
            name="inspect_examples",
            tags=["tokenizers", "reports"],
        ),
    )
