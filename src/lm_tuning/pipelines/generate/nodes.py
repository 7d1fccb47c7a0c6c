"""Node of the generate pipeline."""

from __future__ import annotations

import logging
from pathlib import Path

from lm_tuning.answering.records import AnswersRecord
from lm_tuning.parameters import (
    DataParameters,
    EnvironmentParameters,
    GenerateParameters,
    ModelParameters,
    TokenizeParameters,
)
from lm_tuning.pipelines import DIGEST_CACHE
from lm_tuning.progress import show_progress

logger = logging.getLogger(__name__)


def answer_prompts(
    tuned_model: Path,
    generation_work: Path,
    *,
    generate: GenerateParameters,
    data: DataParameters,
    tokenize: TokenizeParameters,
    model: ModelParameters,
    environment: EnvironmentParameters,
    seed: int,
) -> tuple[Path, AnswersRecord]:
    """Answer all prompts, or those that an interrupted run has left; return the finished file and its figures."""
    from lm_tuning.answering import run

    settings = run.AnswerSettings.choose(
        tuned_model, generate, data, tokenize, model=model, environment=environment, seed=seed, cache=DIGEST_CACHE
    )
    with show_progress() as on_progress:
        finished, record = run.answer_prompts(tuned_model, generation_work, settings, on_progress=on_progress)
    logger.info("%s", run.describe_answers(record))
    return finished, record
