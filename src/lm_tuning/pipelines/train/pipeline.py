"""The training pipeline: tokens in, a tuned model and its reports out."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from .nodes import train_model


def create_pipeline() -> Pipeline:
    """Wire training."""
    return Pipeline(
        [
            Node(
                func=train_model,
                inputs={
                    "tokenized_examples": "tokenized_examples",
                    "base_model": "base_model",
                    "checkpoints": "checkpoints",
                    "metric_stream": "metric_stream",
                    "train": "params:train",
                    "model": "params:model",
                    "seed": "params:seed",
                    "task": "params:task",
                },
                outputs=["tuned_model", "training_summary", "efficiency_summary", "health_report", "loss_curve"],
                name="train_model",
                tags="torch",
            ),
        ],
        namespace="train",
        prefix_datasets_with_namespace=False,
    )
