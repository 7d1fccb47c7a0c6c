"""Node of the predict pipeline."""

from __future__ import annotations

import logging
from pathlib import Path

from lm_tuning.classifying.records import PredictionsRecord
from lm_tuning.parameters import (
    DataParameters,
    EnvironmentParameters,
    EvaluateParameters,
    ModelParameters,
    PredictParameters,
    TokenizeParameters,
)
from lm_tuning.pipelines import DIGEST_CACHE
from lm_tuning.progress import show_progress

logger = logging.getLogger(__name__)


def predict_classes(
    tuned_model: Path,
    prediction_work: Path,
    *,
    predict: PredictParameters,
    data: DataParameters,
    tokenize: TokenizeParameters,
    evaluate: EvaluateParameters,
    model: ModelParameters,
    environment: EnvironmentParameters,
    seed: int,
) -> tuple[Path, PredictionsRecord]:
    """Predict all rows, or those that an interrupted run has left; return the finished file and its figures."""
    from lm_tuning.classifying import run

    settings = run.PredictSettings.choose(
        tuned_model, predict, data, tokenize, evaluate=evaluate, model=model, environment=environment, seed=seed,
        cache=DIGEST_CACHE,
    )  # fmt: skip
    with show_progress() as on_progress:
        finished, record = run.predict_rows(tuned_model, prediction_work, settings, on_progress=on_progress)
    return finished, _tell(record)


def _tell(record: PredictionsRecord) -> PredictionsRecord:
    """Log what the predictions came to."""
    from lm_tuning.classifying.run import describe_predictions

    logger.info("%s", describe_predictions(record))
    return record
