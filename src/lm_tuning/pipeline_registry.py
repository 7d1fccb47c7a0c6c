"""The pipelines that ``kedro run --pipelines`` knows.

An explicit table: Kedro's ``find_pipelines`` returns only the requested names, so none could be composed of others.
"""

from __future__ import annotations

from kedro.pipeline import Pipeline

from lm_tuning.pipelines import (
    evaluate,
    example_data,
    export,
    generate,
    predict,
    preflight,
    profile,
    split,
    tokenize,
    train,
)


def register_pipelines() -> dict[str, Pipeline]:
    """Return every pipeline by name."""
    make_example = example_data.create_pipeline()
    split_rows = split.create_pipeline()
    tokenize_rows = tokenize.create_pipeline()
    train_model = train.create_pipeline()
    evaluate_model = evaluate.create_pipeline()
    return {
        "example_data": make_example,
        "split": make_example + split_rows,
        "tokenize": tokenize_rows,
        "preflight": make_example + split_rows + tokenize_rows + preflight.create_pipeline(),
        "train": tokenize_rows + train_model,
        "profile": tokenize_rows + profile.create_pipeline(),
        "evaluate": evaluate_model,
        "predict": predict.create_pipeline(),
        "generate": generate.create_pipeline(),
        "export": export.create_pipeline(),
        "__default__": make_example + split_rows + tokenize_rows + train_model + evaluate_model,
    }
