"""The predict pipeline: a tuned classifier and a file of rows in, the class of each row out."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from lm_tuning.pipelines import datasets, namespaced, params

from .nodes import predict_classes


def create_pipeline() -> Pipeline:
    """Wire predicting."""
    return namespaced(
        "predict",
        Node(
            func=predict_classes,
            inputs=datasets("tuned_model", "prediction_work")
            | params("predict", "data", "tokenize", "evaluate", "model", "environment", "seed"),
            outputs=["predictions", "prediction"],
            name="predict_classes",
            tags=["torch", "tokenizers", "gpu"],
        ),
    )
