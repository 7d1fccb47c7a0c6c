"""Nodes of the evaluation pipeline."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lm_tuning.parameters import EnvironmentParameters, EvaluateParameters, ModelParameters
from lm_tuning.progress import show_progress
from lm_tuning.storage.folders import FolderStore, StagedFolder

logger = logging.getLogger(__name__)


def evaluate_models(
    tuned_model: Path,
    tokenized_examples: Path,
    base_evaluation_cache: FolderStore,
    *,
    evaluate: EvaluateParameters,
    model: ModelParameters,
    environment: EnvironmentParameters,
    seed: int,
) -> tuple[StagedFolder | Path, dict[str, Any], str, Any]:
    """Measure base and tuned model; return the base's measurement, all figures, the report and every answer."""
    import pandas as pd
    from rich.console import Console

    from lm_tuning.evaluation import results
    from lm_tuning.models.tuned import read_tuning
    from lm_tuning.runtime.device import describe_device
    from lm_tuning.runtime.precision import choose_precision

    tuning = read_tuning(tuned_model)
    device = describe_device()
    # Who trained in float32 is measured in float32; other formats are this device's choice, which may lack that one.
    exact = tuning.get("compute_dtype") == "float32" and model.dtype in ("auto", "float32")
    # Without gradients nobody needs float32 master weights, so full weights are loaded as LoRA's base is.
    precision = choose_precision(
        device,
        requested="float32" if exact else "auto",
        method="qlora" if tuning["method"] == "qlora" else "lora",
        weights_dtype=model.dtype,
    )
    with show_progress() as on_progress:
        compared = results.evaluate_models(
            tuned_model,
            tokenized_examples,
            base_evaluation_cache,
            seed=seed,
            device=device.kind,
            memory_bytes=device.memory_bytes or None,
            weights_dtype=precision.weights,
            compute_dtype=precision.compute,
            tf32=environment.tf32,
            attention=model.attention,
            max_loss_rows=evaluate.max_loss_rows,
            num_generate_rows=evaluate.num_generate_rows,
            max_new_tokens=evaluate.max_new_tokens,
            num_beams=evaluate.num_beams,
            micro_batch_tokens=None if evaluate.micro_batch_tokens == "auto" else evaluate.micro_batch_tokens,
            generate_batch_rows=evaluate.generate_batch_rows,
            num_samples=evaluate.num_samples,
            on_progress=on_progress,
        )
    facts: dict[str, Any] = {
        "tuned_folder": str(tuned_model),
        **{name: tuning.get(name) for name in ("tokens_per_second", "samples_per_second", "steps_per_second")},
    }
    logger.info("%s", results.describe_outcome(compared.result))
    Console().print(results.build_summary(compared.result, **facts))
    # A frame rather than a list, so that the file has its header even without rows.
    answers = pd.DataFrame(compared.answers, columns=list(compared.columns))
    return compared.base_evaluation, compared.result, results.build_markdown(compared.result, **facts), answers
