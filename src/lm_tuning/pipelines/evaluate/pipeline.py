"""The evaluation pipeline: a tuned model and held-out tokens in, figures and samples out."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from lm_tuning.pipelines import datasets, namespaced, params

from .nodes import evaluate_models


def create_pipeline() -> Pipeline:
    """Wire the evaluation."""
    return namespaced(
        "evaluate",
        Node(
            func=evaluate_models,
            inputs=datasets("tuned_model", "tokenized_examples", "base_evaluation_cache", "evaluation_history")
            | params("evaluate", "model", "environment", "seed", "output"),
            outputs=datasets(
                "base_evaluation",
                "evaluation",
                "evaluation_report",
                "evaluation_page",
                "evaluation_samples",
                "evaluation_row_scores",
                "evaluation_figures",
            ),
            name="evaluate_models",
            tags=["torch", "gpu", "reports"],
        ),
    )
