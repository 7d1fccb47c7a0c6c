"""The export pipeline: a tuned model in; a folder that other programs load, a model in MLflow and an upload out."""

from __future__ import annotations

from kedro.pipeline import Node, Pipeline

from lm_tuning.pipelines import datasets, namespaced, params

from .nodes import export_model, serve_export, upload_export


def create_pipeline() -> Pipeline:
    """Wire the export."""
    return namespaced(
        "export",
        Node(
            func=export_model,
            inputs=datasets("tuned_model", "tokenized_examples", "export_work", "report_folder", "raw_examples")
            | params("export", "model"),
            outputs=["exported_model", "export_record"],
            name="export_model",
            tags=["torch", "gpu"],
        ),
        Node(
            func=serve_export,
            inputs=datasets("exported_model", "export_record", "tuned_model", "tokenized_examples")
            | params("export", "evaluate"),
            outputs="served_model",
            name="serve_export",
        ),
        Node(
            func=upload_export,
            inputs=datasets("exported_model") | params("export"),
            outputs="export_upload",
            name="upload_export",
        ),
    )
