"""The training pipeline: tokens in, a tuned model and its reports out."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from lm_tuning.pipelines import datasets, namespaced, params

from .nodes import train_model


def create_pipeline() -> Pipeline:
    """Wire training."""
    return namespaced(
        "train",
        Node(
            func=train_model,
            inputs=datasets("tokenized_examples", "base_model", "checkpoints", "batch_plans")
            | datasets("metric_stream", "live_health")
            | params("train", "model", "evaluate", "seed", "task"),
            outputs=datasets("tuned_model", "training_summary", "efficiency_summary", "efficiency")
            | datasets("health_report", "loss_curve", "batch_plan", "batch_plan_curve"),
            name="train_model",
            tags=["torch", "gpu"],
        ),
    )
