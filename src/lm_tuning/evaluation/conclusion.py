"""How sure a finished comparison is: intervals, verdict, the best earlier model, and the gate."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from lm_tuning.evaluation.base import Comparison, EvaluationJob
from lm_tuning.evaluation.records import ModelDigests
from lm_tuning.evaluation.score_plots import draw_scores
from lm_tuning.evaluation.statistics.earlier_runs import (
    RunName,
    compare_with_best,
    history_folder,
    keep_run,
    write_earlier,
)
from lm_tuning.evaluation.statistics.gate import check_gate, count_gate
from lm_tuning.evaluation.statistics.outcomes import judge_scores, score_metrics, write_verdict
from lm_tuning.evaluation.statistics.records import EarlierRunRecord
from lm_tuning.models.tuned import LABELS_NAME
from lm_tuning.storage.digests import digest_files, digest_values

logger = logging.getLogger(__name__)

MAJORITY_CLASS = "majority class"


def conclude(compared: Comparison, job: EvaluationJob) -> Comparison:
    """Write into a result how sure it is.

    Args:
        compared: with the scored rows of both models; its result gets ``scores``, ``verdict``, ``earlier_run``,
            ``gate`` and the figures of these for MLflow.
        job: of the comparison.

    Returns:
        The comparison with plots of the scores.
    """
    result, settings = compared.result, job.settings
    is_classifier = job.tuning["task"] == "sequence_classification"
    digests = ModelDigests(
        base=MAJORITY_CLASS if is_classifier else job.tuning["base"]["digest"], tuned=digest_weights(job.tuned_folder)
    )
    scores = judge_scores(compared.scored, seed=settings.seed)
    result["model_digests"] = digests
    result["scores"] = scores
    result["intervals"] = score_metrics(scores)
    result["verdict"] = write_verdict(scores[0]) + "." if scores else "No row was scored."
    result["earlier_run"] = _compare_with_earlier(compared, job, digests["tuned"])
    if gate := settings.evaluate.gate:
        result["gate"] = check_gate(gate, scores, dict(result["tuned"]))
        result["gate_bounds"] = count_gate(result["gate"])
    _log(compared)
    return replace(compared, figures={**compared.figures, **draw_scores(scores, compared.scored)})


def digest_weights(folder: Path) -> str:
    """Return what names the weights of a tuned model, its label map included: equal models have equal digests.

    Args:
        folder: adapter or full weights.
    """
    paths = sorted([*folder.glob("*.safetensors"), *folder.glob("adapter_config.json"), *folder.glob(LABELS_NAME)])
    return digest_values([[path.name, digest] for path, digest in zip(paths, digest_files(paths), strict=True)])


def _compare_with_earlier(compared: Comparison, job: EvaluationJob, model_digest: str) -> EarlierRunRecord | None:
    """Compare with the best earlier model on the same data, and keep this one for later ones."""
    if job.history is None or job.split is None or not compared.scored:
        return None
    folder = history_folder(job.history, tokens_key=job.tokens_key, split=job.split)
    tuned = {name: rows for name, (_, rows) in compared.scored.items()}
    main = next(iter(tuned.values()))
    found = compare_with_best(folder, main, model_digest=model_digest, seed=job.settings.seed)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    run_id = job.tuning.get("mlflow_run_id")
    keep_run(folder, RunName(output=job.output, date=now, model_digest=model_digest, mlflow_run_id=run_id), tuned)
    return found


def _log(compared: Comparison) -> None:
    result = compared.result
    logger.info("%s", result["verdict"])
    earlier = result["earlier_run"]
    if earlier is not None:
        logger.info("%s", write_earlier(earlier, result["scores"][0]))
    for bound in result.get("gate", []):
        logger.log(logging.INFO if bound["is_reached"] else logging.WARNING, "%s", bound["message"])
