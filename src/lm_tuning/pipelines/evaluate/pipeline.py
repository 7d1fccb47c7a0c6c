"""The evaluation pipeline: a tuned model and held-out tokens in, figures and samples out."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from .nodes import evaluate_models


def create_pipeline() -> Pipeline:
    """Wire the evaluation."""
    return Pipeline(
        [
            Node(
                func=evaluate_models,
                inputs={
                    "tuned_model": "tuned_model",
                    "tokenized_examples": "tokenized_examples",
                    "base_evaluation_cache": "base_evaluation_cache",
                    "evaluate": "params:evaluate",
                    "model": "params:model",
                    "environment": "params:environment",
                    "seed": "params:seed",
                },
                outputs=["base_evaluation", "evaluation", "evaluation_report", "evaluation_samples"],
                name="evaluate_models",
                tags=["torch", "gpu", "reports"],
            ),
        ],
        namespace="evaluate",
        prefix_datasets_with_namespace=False,
    )
