"""Node of the preflight pipeline."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lm_tuning.parameters import ModelParameters, PreflightParameters, TokenizeParameters, TrainParameters
from lm_tuning.progress import show_progress
from lm_tuning.runtime.device import current_device

logger = logging.getLogger(__name__)


def inspect_examples(
    tokenized_examples: Path,
    example_splits: Path,
    base_model: dict[str, Any],
    *,
    token_summary: dict[str, Any],
    split_summary: dict[str, Any],
    data_report: dict[str, Any],
    split_report: dict[str, Any],
    token_report: dict[str, Any],
    model: ModelParameters,
    tokenize: TokenizeParameters,
    train: TrainParameters,
    preflight: PreflightParameters,
    seed: int,
) -> tuple[dict[str, Any], str, str]:
    """Look at the rows as training will see them; return the figures, a Markdown report and an HTML page."""
    from rich.console import Console

    from lm_tuning.models.loading import load_tokenizer, read_config
    from lm_tuning.models.structure import position_limit
    from lm_tuning.preflight.figures import describe_preflight, inspect_tokens
    from lm_tuning.preflight.report import compose_report
    from lm_tuning.reporting.html import write_page
    from lm_tuning.reporting.markdown import write_markdown
    from lm_tuning.reporting.terminal import build_summary

    where = {name: base_model[name] for name in ("name_or_path", "revision", "trust_remote_code")}
    tokenizer, config = load_tokenizer(**where), read_config(**where)
    with show_progress() as on_progress:
        figures = inspect_tokens(
            tokenized_examples,
            example_splits,
            tokenizer,
            model_name=base_model["name_or_path"],
            token_summary=token_summary,
            split_summary=split_summary,
            findings=data_report["facts"]["findings"],
            device=current_device().kind,
            attention=model.attention,
            max_length_tokens=tokenize.max_length_tokens,
            max_positions=position_limit(config),
            seed=seed,
            effective_batch_rows=train.effective_batch_rows,
            effective_batch_tokens=train.effective_batch_tokens,
            num_epochs=train.num_epochs,
            max_steps=train.max_steps,
            micro_batch_tokens=None if train.micro_batch_tokens == "auto" else train.micro_batch_tokens,
            batching=train.batching,
            warmup_steps=train.trainer.get("warmup_steps", 0),
            eval_every_steps=train.eval_every_steps,
            save_every_steps=train.save_every_steps,
            load_best=train.load_best,
            num_examples=preflight.num_examples,
            num_embeddings=getattr(config.get_text_config(), "vocab_size", None),
            on_progress=on_progress,
        )
    report = compose_report(figures)
    for line in describe_preflight(figures):
        logger.info("%s", line)
    Console().print(build_summary(report))
    return figures, write_markdown(report), write_page(report)
