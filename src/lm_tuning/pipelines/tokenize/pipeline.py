"""The tokenize pipeline: rows and a base model in, token ids with loss spans out."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from lm_tuning.pipelines import datasets, namespaced, params

from .nodes import prepare_base_model, tokenize_examples


def create_pipeline() -> Pipeline:
    """Wire tokenizing."""
    return namespaced(
        "tokenize",
        # It needs no rows, so a missing model is found before any is read.
        Node(
            func=prepare_base_model,
            inputs=params("model", "evaluate", "task"),
            outputs="base_model",
            name="prepare_base_model",
            tags=["torch"],
        ),
        Node(
            func=tokenize_examples,
            inputs=datasets("example_splits", "base_model", "token_cache")
            | params("tokenize", "data", "split", "train", "seed", "task"),
            outputs=["tokenized_examples", "token_summary", "length_histogram", "token_report"],
            name="tokenize_examples",
            tags=["tokenizers"],
        ),
    )
