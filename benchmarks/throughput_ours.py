"""The product's side of ``throughput.py``: random rows and a random model through ``run_training``."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from throughput_works import SHAPES, Work, device, draw_classes, draw_lengths, draw_rows, make_model


def run_ours(work: Work, options: argparse.Namespace, *, started: float) -> dict[str, Any]:
    """Train through ``run_training``.

    Args:
        work: what is trained.
        options: of the command.
        started: when the process began, in seconds since the epoch.
    """
    import torch
    from torch._dynamo.utils import counters

    from lm_tuning.runtime.backend import apply_backend
    from lm_tuning.training.run import TrainingPaths, run_training

    _choose_as_in_a_long_run()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    apply_backend(tf32=True, flash_sdp=True, mem_efficient_sdp=True, reproducibility="fast", num_threads="auto")
    budget = options.budget or work.budget
    mean = float(draw_lengths(options.lengths, 4000).mean())
    rows_per_step = max(int(0.95 * options.micro_batches * budget / mean), 1)
    imports_seconds = time.time() - started
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _write_model(folder / "model", work)
        _write_tokens(folder / "tokens", work, options.lengths, rows_per_step * options.steps)
        settings = _settings(work, options, folder / "model", budget=budget, rows_per_step=rows_per_step)
        paths = TrainingPaths(folder / "tokens", folder / "runs", options.plans)
        if device() == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.time()
        result = run_training(paths, settings)
        seconds = time.time() - began
        if options.profile:
            _profile(paths, settings, options)
    rows = result.efficiency[options.skip :]
    facts = result.health["facts"]
    start_seconds = seconds - sum(row["seconds"] for row in result.efficiency)
    return {
        "tokens_per_second": sum(row["num_tokens"] for row in rows) / sum(row["seconds"] for row in rows),
        "steps": [(row["num_tokens"], row["seconds"]) for row in result.efficiency],
        "padding": float(np.mean([row["padding_fraction"] for row in rows])),
        "memory_gb": max(row["peak_memory_bytes"] for row in rows) / 2**30,
        "losses": [round(next(row[key] for key in row if key.startswith("loss_")), 4) for row in result.steps],
        "micro_batches": rows[0]["num_micro_batches"],
        "budget": result.batch_plan.micro_batch_tokens,
        "compile_seconds": facts.get("compile_seconds"),
        "fast_path": facts["fast_path"],
        "compile_failure": facts.get("compile_failure"),
        "loader_wait": result.summary["loader_wait_fraction"],
        "health_seconds": result.summary["health_seconds"],
        "whole_run_seconds": seconds,
        "start_seconds": start_seconds,
        "plan": {
            "reason": result.batch_plan.reason,
            "seconds": result.batch_plan.seconds,
            "cached": result.batch_plan.cached,
            "checkpointing": result.batch_plan.gradient_checkpointing,
            "curve": result.batch_plan.to_json()["curve"],
        },
        "imports_seconds": imports_seconds,
        "first_step_ends_seconds": imports_seconds + start_seconds + result.efficiency[0]["seconds"],
        "graphs": counters["stats"]["unique_graphs"],
        "graphs_kept_from_before": counters["aot_autograd"]["autograd_cache_hit"],
        "findings": [finding["code"] for finding in result.health["findings"]],
    }


def _choose_as_in_a_long_run() -> None:
    """Let the head's loss be chosen as in a run of hours, of which these steps are to be a part.

    A run this short would not wait for a faster kernel to be compiled.
    """
    import math

    from lm_tuning.training.kernels import fast_path

    choose = fast_path.choose_head_loss
    fast_path.choose_head_loss = lambda *given, **named: choose(*given, **named | {"num_positions": math.inf})


def _write_model(folder: Path, work: Work) -> None:
    """Write a random language model; a classifier's head is made by the training itself."""
    import torch

    from tests.support.tiny import make_tokenizer

    model = make_model(work.shape, "bfloat16" if device() == "cuda" else "float32", "sdpa")
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    del model
    if device() == "cuda":
        torch.cuda.empty_cache()


def _write_tokens(folder: Path, work: Work, lengths: str, count: int) -> None:
    """Write the training rows and no validation rows."""
    from lm_tuning.text.store.table import TokenTableWriter

    folder.mkdir()
    rows = draw_rows(lengths, count, SHAPES[work.shape].vocabulary)
    with TokenTableWriter(folder / "train.arrow") as writer:
        if work.num_classes:
            for number, (ids, label) in enumerate(zip(rows, draw_classes(count, work.num_classes), strict=True)):
                writer.append(number + 1, ids, [], label=int(label))
        else:
            for number, ids in enumerate(rows):
                writer.append(number + 1, ids, [(0, len(ids))])
    with TokenTableWriter(folder / "validation.arrow"):
        pass


def _settings(work: Work, options: argparse.Namespace, model: Path, *, budget: int, rows_per_step: int) -> Any:
    """Return the settings of the training."""
    from random_base import random_base

    from lm_tuning.parameters import TrainParameters
    from lm_tuning.runtime.device import describe_device
    from lm_tuning.runtime.precision import choose_precision
    from lm_tuning.training.run import TrainingSettings

    card = describe_device()
    precision = choose_precision(card, method=work.method)
    return TrainingSettings(
        train=TrainParameters(
            method=work.method,
            learning_rate=1e-4,
            effective_batch_rows=rows_per_step,
            max_steps=options.steps,
            micro_batch_tokens="auto" if options.plan else budget,
            gradient_checkpointing="auto" if options.plan else False,
            batching=options.batching,
            compile={"auto": "auto", "yes": True, "no": False}[options.compile],
            trainer={"lr_scheduler_type": "constant"},
        ),
        base=random_base(model, work.shape),
        tokens_key="random",
        task="sequence_classification" if work.num_classes else "causal_lm",
        label_map={f"class {index:03}": index for index in range(work.num_classes)} or None,
        weights_dtype=precision.weights,
        compute_dtype=precision.compute,
        device=card.kind,
        seed=0,
    )


def _profile(paths: Any, settings: Any, options: argparse.Namespace) -> None:
    """Profile a few steps and write the table and the trace."""
    from lm_tuning.reporting.markdown import write_markdown
    from lm_tuning.training.profile.profiling import compose_report, profile_training

    profile = profile_training(paths, settings, folder=options.profile, num_steps=2)
    (options.profile / "profile.md").write_text(write_markdown(compose_report(profile, {"work": options.works[0]})))
