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
                    "batch_plans": "batch_plans",
                    "metric_stream": "metric_stream",
                    "live_health": "live_health",
                    "train": "params:train",
                    "model": "params:model",
                    "evaluate": "params:evaluate",
                    "seed": "params:seed",
                    "task": "params:task",
                },
                outputs={
                    "model_folder": "tuned_model",
                    "steps": "training_summary",
                    "efficiency_of_steps": "efficiency_summary",
                    "efficiency": "efficiency",
                    "health": "health_report",
                    "loss_curve": "loss_curve",
                    "batch_plan": "batch_plan",
                    "batch_plan_curve": "batch_plan_curve",
                },
                name="train_model",
                tags=["torch", "gpu"],
            ),
        ],
        namespace="train",
        prefix_datasets_with_namespace=False,
    )
