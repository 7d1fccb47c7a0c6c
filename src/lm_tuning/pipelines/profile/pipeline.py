"""The profile pipeline: tokens in, a table of where the time of a training step goes and a trace out."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from lm_tuning.pipelines import datasets, namespaced, params

from .nodes import profile_steps


def create_pipeline() -> Pipeline:
    """Wire the profile."""
    return namespaced(
        "profile",
        Node(
            func=profile_steps,
            inputs=datasets("tokenized_examples", "base_model", "profile_work", "batch_plans")
            | params("train", "model", "seed", "task", "output"),
            outputs=["profile", "profile_report", "profile_trace"],
            name="profile_steps",
            tags=["torch", "gpu", "reports"],
        ),
    )
