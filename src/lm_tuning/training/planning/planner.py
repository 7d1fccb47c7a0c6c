"""Choose how a step is split: the micro-batch size that is fastest within a share of the memory.

The effective batch is the user's and stays as it is; only how many tokens go through the model at once is chosen here,
and whether gradient checkpointing is on. Bigger is faster only up to a point: a card whose memory is nearly full spends
its time on moving blocks about, so the speed is measured, in a process of its own, before the training loads anything.
On a CPU the size is fixed.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import lm_tuning
from lm_tuning.batching.micro_batches import choose_micro_batch_tokens
from lm_tuning.errors import UserError
from lm_tuning.parameters.groups import EnvironmentParameters
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.storage.digests import digest_values
from lm_tuning.text.store.table import TokenTable, open_split
from lm_tuning.training.planning.memory import estimate_training
from lm_tuning.training.planning.out_of_memory import MemoryReading, read_memory
from lm_tuning.training.planning.plan import (
    BatchPlan,
    choose_point,
    explain_choice,
    keep_plan,
    list_budgets,
    read_plan,
)
from lm_tuning.training.planning.records import PlanFacts, ProbeAnswer, ProbePoint, ProbeRequest
from lm_tuning.training.planning.whole_step import plan_whole_step
from lm_tuning.training.settings import TrainingPaths, TrainingSettings, step_plan_of

__all__ = ["BatchPlan", "plan_batches"]

logger = logging.getLogger(__name__)

VERSION = 2
"""Counts up when earlier plans should not be used any more."""

SECONDS = 59.0
"""What planning may take, the start of the process and the model's loading included."""

_LAST_SECONDS = 4.0
_MUCH_LONGER = 2.0
"""How many times as many tokens a run has to have for a plan that was cut short to be made again."""
_POLL_SECONDS = 0.1
_STDERR_LINES = 3
_WHAT = "Planning micro-batches"


@dataclass(frozen=True)
class _Question:
    """What the planner is to decide: how steps are split, and whether gradient checkpointing is on.

    Attributes:
        settings: of the training.
        table: of the training rows.
        budgets: that make a difference, ascending.
        start: index of the one that is tried first.
        modes: whether activations may be checkpointed, in order of preference.
        reading: the device's memory.
    """

    settings: TrainingSettings
    table: TokenTable
    budgets: list[int]
    start: int
    modes: list[bool]
    reading: MemoryReading


def plan_batches(
    paths: TrainingPaths,
    settings: TrainingSettings,
    *,
    cache_folder: Path,
    seconds: float = SECONDS,
    on_progress: OnProgress = ignore_progress,
) -> BatchPlan:
    """Choose the micro-batch size, and gradient checkpointing where it is left open.

    Call it before the model is loaded: the probe needs the device for itself.

    Args:
        paths: where the tokens lie.
        settings: of the training. ``micro_batch_tokens`` and ``gradient_checkpointing`` are kept unless they are
            ``auto``; whatever is kept is only measured.
        cache_folder: where plans are kept, a file for each model, method and device; it is made.
        seconds: that planning may take.
        on_progress: receives the budgets done.

    Returns:
        The plan. When the probe dies or does not come to an end in time, it is an estimate with a warning.

    Raises:
        UserError: there are no rows, or the run has no end or no effective batch.
    """
    # Not perf_counter: the process that measures compares this time with a clock of its own.
    began = time.time()
    table = open_split(paths.tokens, "train")
    steps = step_plan_of(settings, table)
    budgets, start = list_budgets(settings, table, steps)
    run_tokens = steps.total_steps / steps.steps_per_epoch * float(table.lengths.sum())
    modes = _modes(settings.train.gradient_checkpointing)
    question = _Question(settings, table, budgets, start, modes, read_memory(settings.device))
    file = cache_folder / f"{_key(question)}.json"
    known = read_plan(file, question.reading)
    if known is not None and not _was_cut_short(known, run_tokens):
        plan = replace(known, cached=True, seconds=time.time() - began, file=str(file))
        logger.info("Micro-batches as planned before (%s): %s.", file, plan.reason)
        return plan
    request = ProbeRequest(
        tokens=paths.tokens.resolve(),
        settings=settings,
        budgets=budgets,
        start=start,
        checkpointing=modes,
        began_at=began,
        ends_at=began + seconds - _LAST_SECONDS,
        run_tokens=run_tokens,
        backend=_read_switches(),
    )
    on_progress(_WHAT, 0, len(budgets), "sizes")
    answer = run_process(request, kill_at=began + seconds, on_points=lambda n: _say(on_progress, n, len(budgets)))
    on_progress(_WHAT, len(budgets), len(budgets), "sizes")
    measured = choose_point(answer.points)
    if measured is None:
        plan = _estimate_plan(question, answer)
    else:
        plan = BatchPlan(
            micro_batch_tokens=measured.micro_batch_tokens,
            gradient_checkpointing=measured.gradient_checkpointing,
            curve=answer.points,
            reason=explain_choice(measured, answer),
            seconds=0.0,
            cached=False,
            facts=answer.facts,
            not_tried=answer.not_tried,
            warning=_incomplete(answer),
        )
    if plan.warning is not None:
        logger.warning("%s", plan.warning)
    plan = replace(plan, seconds=time.time() - began)
    if answer.error is None and measured is not None:
        plan = replace(plan, file=str(file))
        keep_plan(file, plan)
    logger.info("Micro-batches: %s (planned in %.0f s).", plan.reason, plan.seconds)
    return plan


def run_process(
    request: ProbeRequest, *, kill_at: float, on_points: Callable[[int], object] = lambda count: None
) -> ProbeAnswer:
    """Run a probe in a fresh process and return what it found, whatever becomes of it.

    Args:
        request: what is to be measured.
        kill_at: when the process is ended, in seconds since the epoch.
        on_points: receives the number of points measured so far.

    Returns:
        The answer; its ``error`` says how the process ended, when not by itself.
    """
    with tempfile.TemporaryDirectory(prefix="lm-tuning-plan-") as folder:
        request_path, answer_path, words = (
            Path(folder, name) for name in ("request.pickle", "answer.json", "said.txt")
        )
        request_path.write_bytes(pickle.dumps(request))
        source = str(Path(lm_tuning.__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
        # -P keeps the folder that it is started in out of the search for modules.
        command = [sys.executable, "-P", "-m", "lm_tuning.training.planning.probe", str(request_path), str(answer_path)]
        try:
            with words.open("wb") as output:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "PYTHONPATH": path},
                )
        except OSError as error:
            return ProbeAnswer(error=f"its process could not be started: {error}")
        killed = False
        try:
            while process.poll() is None:
                on_points(len(_read_answer(answer_path).points))
                if time.time() > kill_at:
                    process.kill()
                    killed = True
                    break
                time.sleep(_POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        answer = _read_answer(answer_path)
        if answer.error is None and not answer.finished:
            if killed:
                answer.error = None if answer.points else "it had measured nothing when its time was over"
            else:
                answer.error = _describe_end(process.returncode, words.read_text(encoding="utf-8", errors="replace"))
        return answer


def _estimate_plan(question: _Question, answer: ProbeAnswer) -> BatchPlan:
    """Choose by arithmetic where nothing could be measured."""
    reading = question.reading
    if any(point.outcome == "out of memory" for point in answer.points):
        cause = "no size that was tried went through the model without running out of memory"
        tokens, checkpointing, how = question.budgets[0], question.modes[-1], "the smallest size is tried"
    else:
        cause = f"the probe of micro-batch sizes failed: {answer.error}"
        tokens, checkpointing, how = _choose_by_arithmetic(question)
    size = f"{tokens:,} tokens" + (" with gradient checkpointing" if checkpointing else "")
    facts = PlanFacts(
        device=reading.name,
        total_bytes=reading.total,
        memory_fraction=question.settings.train.memory_fraction,
    )
    return BatchPlan(
        micro_batch_tokens=tokens,
        gradient_checkpointing=checkpointing,
        curve=answer.points,
        reason=f"{size}, not measured, since {cause}; {how}",
        seconds=0.0,
        cached=False,
        facts={**facts, **answer.facts},
        not_tried=answer.not_tried,
        warning=f"Micro-batches could not be planned by measurement, since {cause}; {how}: {size}. "
        "train.micro_batch_tokens sets the size by hand.",
    )


def _choose_by_arithmetic(question: _Question) -> tuple[int, bool, str]:
    """Choose the usual size of the device, or the largest below it that fits by estimate."""
    from lm_tuning.training.setup.model import build_skeleton_of

    settings = question.settings
    usual = choose_micro_batch_tokens(None, device=settings.device)
    sizes = [size for size in question.budgets if size <= usual] or question.budgets[:1]
    try:
        estimate = estimate_training(build_skeleton_of(settings), settings)
    except (UserError, AttributeError, KeyError, TypeError, ValueError) as error:
        logger.debug("No estimate of memory: %s", error)
        return sizes[-1], question.modes[0], "this is the usual size for the device"
    room = settings.train.memory_fraction * question.reading.total - question.reading.others
    # Sizes below the first one keep a device hardly busy, so checkpointing is taken before them.
    first = min(question.start, len(sizes) - 1)
    for mode, worth in [*((mode, sizes[first:]) for mode in question.modes), (question.modes[-1], sizes[:first])]:
        for size in reversed(worth):
            total = estimate.total(size, gradient_checkpointing=mode)
            if total <= room:
                return size, mode, f"by arithmetic it takes {total / 2**30:.1f} GiB"
    return sizes[0], question.modes[-1], "by arithmetic nothing fits, so this is the smallest size"


def _key(question: _Question) -> str:
    """Identify what a plan depends on: model, method, arithmetic, the rows' shape and the device."""
    import transformers

    settings, table, reading = question.settings, question.table, question.reading
    train = settings.train
    supervised = float(table.num_supervised.sum()) / max(float(table.lengths.sum()), 1.0)
    return digest_values(
        {
            "version": VERSION,
            # Of the release that made the first plans. VERSION says what a plan is good for, so that a release does not
            # cost half a minute of planning.
            "product": "0.1.0",
            "base": settings.base["digest"],
            "method": train.method,
            "lora": train.lora.model_dump() if train.method != "full" else {},
            "qlora": train.qlora.model_dump() if train.method == "qlora" else {},
            "freeze": train.freeze,
            "types": [settings.weights_dtype, settings.compute_dtype],
            "task": settings.task,
            "num_labels": len(settings.label_map or {}),
            "attention": settings.attention,
            "batching": train.batching,
            "optimizer": [train.trainer.get("optim"), train.trainer.get("optim_args")],
            "device": [settings.device, reading.name, reading.total],
            "switches": _read_switches().model_dump(exclude={"variables"}),
            "packages": [torch.__version__, transformers.__version__],
            "budgets": [*question.budgets, question.start],
            "checkpointing": question.modes,
            "longest_row_tokens": int(table.lengths.max(initial=0)),
            # Rounded, so that a few rows more or less do not ask for a new plan.
            "mean_row_tokens": round(float(np.mean(table.lengths)), -1),
            "supervised_fraction": round(supervised, 1),
            "memory_fraction": float(train.memory_fraction),
        }
    )


def _read_switches() -> EnvironmentParameters:
    """Return how torch's switches stand in this process."""
    backends: Any = torch.backends
    return EnvironmentParameters(
        tf32=backends.cuda.matmul.fp32_precision == "tf32",
        flash_sdp=bool(backends.cuda.flash_sdp_enabled()),
        mem_efficient_sdp=bool(backends.cuda.mem_efficient_sdp_enabled()),
        reproducibility="deterministic" if torch.are_deterministic_algorithms_enabled() else "fast",
        num_threads=torch.get_num_threads(),
    )


def _read_answer(path: Path) -> ProbeAnswer:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ProbeAnswer()
    return ProbeAnswer(**{**stored, "points": [ProbePoint(**point) for point in stored["points"]]})


def _describe_end(code: int, words: str) -> str:
    lines = [line for line in words.splitlines() if line.strip()][-_STDERR_LINES:]
    said = f" and said: {' | '.join(lines)}" if lines else ""
    how = f"signal {-code}" if code < 0 else f"code {code}"
    return f"its process ended with {how}{said}"


def _was_cut_short(plan: BatchPlan, run_tokens: float) -> bool:
    """Return whether a plan was made in the time that a much shorter run than this one is worth."""
    return _MUCH_LONGER * plan.facts.get("cut_short_at_tokens", run_tokens) < run_tokens


def _incomplete(answer: ProbeAnswer) -> str | None:
    if answer.error is None:
        return None
    return (
        f"The probe of micro-batch sizes ended early ({answer.error}); the plan rests on what was measured until then, "
        "and is rebuilt next time."
    )


def _say(on_progress: OnProgress, done: int, total: int) -> None:
    on_progress(_WHAT, min(done, total - 1), total, "sizes")


def _modes(asked: Literal["auto"] | bool) -> list[bool]:
    return [False, True] if asked == "auto" else [asked]


def plans_on_device(settings: TrainingSettings) -> bool:
    """Return whether sizes are chosen by sending rows through the model, before the training itself loads it."""
    is_open = "auto" in (settings.train.micro_batch_tokens, settings.train.gradient_checkpointing)
    return settings.device == "cuda" and is_open


def choose_batches(
    paths: TrainingPaths, settings: TrainingSettings, *, on_progress: OnProgress = ignore_progress
) -> BatchPlan:
    """Settle the tokens of a micro-batch and gradient checkpointing where the settings leave them open.

    Args:
        paths: where the tokens lie, and where plans are kept.
        settings: of the training.
        on_progress: receives the sizes tried.
    """
    if plans_on_device(settings):
        table = open_split(paths.tokens, "train")
        whole_step = plan_whole_step(settings, table, step_plan_of(settings, table), read_memory(settings.device))
        cache_folder = paths.plans or paths.checkpoints / "batch_plans"
        return whole_step or plan_batches(paths, settings, cache_folder=cache_folder, on_progress=on_progress)
    asked = settings.train.micro_batch_tokens
    if asked == "auto":
        settled = choose_micro_batch_tokens(None, device=settings.device)
        why = f"the usual size on a {settings.device.upper()}"
    else:
        settled, why = asked, "as train.micro_batch_tokens says"
    return BatchPlan(
        micro_batch_tokens=settled,
        # What is left to us is settled by measurement on a GPU, and is no elsewhere.
        gradient_checkpointing=settings.train.gradient_checkpointing is True,
        curve=[],
        reason=f"{settled:,} tokens, {why}",
        seconds=0.0,
        cached=False,
    )
