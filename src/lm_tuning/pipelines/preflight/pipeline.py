"""The preflight pipeline: tokens and what is known of them in, one report in three forms out."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from .nodes import inspect_examples


def create_pipeline() -> Pipeline:
    """Wire preflight."""
    return Pipeline(
        [
            Node(
                func=inspect_examples,
                inputs={
                    "tokenized_examples": "tokenized_examples",
                    "example_splits": "example_splits",
                    "base_model": "base_model",
                    "token_summary": "token_summary",
                    "split_summary": "split_summary",
                    "data_report": "data_report",
                    "split_report": "split_report",
                    "token_report": "token_report",
                    "model": "params:model",
                    "tokenize": "params:tokenize",
                    "train": "params:train",
                    "preflight": "params:preflight",
                    "seed": "params:seed",
                },
                outputs=["preflight", "preflight_report", "preflight_page"],
                name="inspect_examples",
                tags=["tokenizers", "reports"],
            ),
        ],
        namespace="preflight",
        prefix_datasets_with_namespace=False,
    )
