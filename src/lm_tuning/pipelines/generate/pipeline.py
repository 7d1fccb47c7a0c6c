"""The generate pipeline: a tuned model and a file of prompts in, answers out."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from lm_tuning.pipelines import datasets, namespaced, params

from .nodes import answer_prompts


def create_pipeline() -> Pipeline:
    """Wire answering."""
    return namespaced(
        "generate",
        Node(
            func=answer_prompts,
            inputs=datasets("tuned_model", "generation_work")
            | params("generate", "data", "tokenize", "model", "environment", "seed"),
            outputs=["generated", "generation"],
            name="answer_prompts",
            tags=["torch", "tokenizers", "gpu"],
        ),
    )
