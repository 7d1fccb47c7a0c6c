"""Measure how fast and how large micro-batches of several sizes are, in a process of its own that trains nothing.

``python -m lm_tuning.training.planning.probe request.pickle answer.json`` loads the model as training does, runs
forward and backward passes over real rows and writes down what they took. There is no optimizer, no step is made and no
file but the answer is written. The answer is renewed after every measurement, so that a process that dies leaves what
it knew.

Layers are not compiled here, which would take longer than everything else: speeds are those of the uncompiled model.
A training that compiles its layers measures once more from there, see :mod:`lm_tuning.training.planning.replanning`.
"""

from __future__ import annotations

import gc
import math
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lm_tuning.batching.losses import LossShape
from lm_tuning.batching.micro_batches import Batching
from lm_tuning.errors import UserError
from lm_tuning.runtime.backend import apply_backend
from lm_tuning.runtime.memory_errors import is_out_of_memory
from lm_tuning.runtime.precision import autocast
from lm_tuning.runtime.threads import collect_rarely, restore_collection
from lm_tuning.storage.atomic import write_json_atomic
from lm_tuning.text.store.table import TokenTable, open_split
from lm_tuning.training.planning.memory import ModelBytes, extrapolate, measure_model
from lm_tuning.training.planning.out_of_memory import read_memory
from lm_tuning.training.planning.probe_rows import (
    IntArray,
    evenly_by_size,
    extreme_rows,
    full_group,
    heaviest_groups,
    sample_steps,
)
from lm_tuning.training.planning.records import PlanFacts, ProbeAnswer, ProbePoint, ProbeRequest
from lm_tuning.training.settings import TrainingSettings, step_plan_of

if TYPE_CHECKING:
    from lm_tuning.batching.batch import MicroBatch
    from lm_tuning.training.setup.model import ReadyModel

# Micro-batches that the timed ones are drawn from.
_MOST_POOLED = 256
_SPEED_SECONDS = (0.3, 1.0)
"""Least and most time for the speed of one budget."""
PLANNING_SHARE = 0.1
"""Of the time that the run is expected to take; the first size that fits is measured in any case."""
_FEWEST_TIMED = 2
_ROUNDS = (2, 20)
"""Least and most times that each of the timed micro-batches is run."""
# A size is expected to take as much longer than the one before as it has more tokens, times this.
_GROWTH_RESERVE = 1.3


class BudgetProbe:
    """Runs micro-batches through a model and says what they took."""

    def __init__(self, ready: ReadyModel, settings: TrainingSettings, table: TokenTable, batching: Batching) -> None:
        """Keep a model that is set up; it is put into training mode.

        Args:
            ready: model and task.
            settings: of the training.
            table: of the training rows.
            batching: ``packed`` or ``padded``.
        """
        self.model, self.task = ready.model.train(), ready.task
        self.settings, self.table, self.batching = settings, table, batching
        plan = step_plan_of(settings, table)
        self.steps = sample_steps(plan)
        self.extremes = extreme_rows(plan, table, max(map(len, self.steps)))
        self.shape = LossShape(label_smoothing=settings.train.label_smoothing)
        self.held = measure_model(self.model, settings.train.trainer)

    def measure(self, budget: int, *, seconds: float) -> tuple[float, int, int]:
        """Measure one budget: first the heaviest micro-batches, then the speed of ordinary ones.

        Args:
            budget: most positions of a micro-batch.
            seconds: for the speed.

        Returns:
            Real tokens per second, the most bytes held by tensors, and the most bytes taken of the device.
        """
        cut = [self._cut(rows, budget) for rows in self.steps]
        pool = [group for groups in cut for group in groups][:_MOST_POOLED]
        extreme = [full_group(rows, self.table, self.task, self.batching, budget=budget) for rows in self.extremes]
        heavy = heaviest_groups([*pool, *extreme], self.table, self.task, self.batching)
        # The heaviest first: they say what a size takes, and leave the allocator with all blocks that the timed ones
        # need.
        reset_peak(self.settings.device)
        for group in heavy:
            self._run(self._lay_out(group))
        # Now gradients are there, kernels are chosen, and the time of one micro-batch says how many can be timed.
        [took] = self._time([self._lay_out(heavy[0])])
        peaks = read_peaks(self.settings.device)
        fewest, most = _ROUNDS
        fitting = int(seconds / max(took, 1e-6) / fewest)
        chosen = evenly_by_size(pool, self.table.lengths, most=max(fitting, _FEWEST_TIMED))
        batches = [self._lay_out(group) for group in chosen]
        rounds = min(max(int(seconds / max(took * len(batches), 1e-6)), fewest), most)
        times = self._time(batches * rounds)
        # The fastest time of each counts: what the host or the allocator does by the way would speak against a size.
        # Rounds go through all of them in turn, so that one disturbance does not meet every run of the same one.
        fastest = [min(times[position :: len(batches)]) for position in range(len(batches))]
        return sum(batch.num_tokens for batch in batches) / max(sum(fastest), 1e-9), *peaks

    def _cut(self, rows: IntArray, budget: int) -> list[list[int]]:
        return self.task.split(self.table, rows, budget_tokens=budget, batching=self.batching)

    def _lay_out(self, group: list[int]) -> MicroBatch:
        return self.task.lay_out(self.table, group, batching=self.batching)

    def _time(self, batches: Sequence[MicroBatch]) -> list[float]:
        """Return the seconds of each; on a GPU its own, so that the host may run ahead as in training."""
        if self.settings.device != "cuda":
            ends = [time.perf_counter()]
            for batch in batches:
                self._run(batch)
                ends.append(time.perf_counter())
            return [end - begin for begin, end in pairwise(ends)]
        # (batches + 1,): the end of one is the beginning of the next. Waiting for the device between them would leave
        # it idle while the host prepares, which training never does.
        marks: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(len(batches) + 1)]  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        marks[0].record()
        for batch, mark in zip(batches, marks[1:], strict=True):
            self._run(batch)
            mark.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1000 for begin, end in pairwise(marks)]

    def _run(self, batch: MicroBatch) -> None:
        """Run forward and backward as training does; gradients stay, as between the micro-batches of a step."""
        settings = self.settings
        count = max(batch.num_supervised, 1)
        on_device = batch.to(settings.device)
        with autocast(settings.device, settings.compute_dtype):
            loss = self.task.sum_nats(self.model, on_device, self.shape) / count
            loss.backward()  # type: ignore[no-untyped-call]


def probe_budgets(request: ProbeRequest, probe: BudgetProbe, answer: ProbeAnswer, on_point: Callable[[], None]) -> None:
    """Measure budgets from small to large, until one does not fit or time is over.

    Args:
        request: what may be tried.
        probe: of the model.
        answer: receives the points and what was not tried.
        on_point: called after each of them.
    """

    def look(budget: int, seconds: float) -> ProbePoint:
        point = try_budget(probe, answer, ProbePoint(budget, checkpointing, "predicted"), seconds=seconds)
        on_point()
        return point

    for checkpointing in request.checkpointing:
        if checkpointing and not getattr(probe.model, "supports_gradient_checkpointing", True):
            break
        switch_checkpointing(probe.model, checkpointing)
        upwards = request.budgets[request.start :]
        ends_at = request.ends_at
        first_fits = False
        expected = 0.0
        for position, budget in enumerate(upwards):
            began = time.time()
            if answer.points and began + expected > ends_at:
                answer.not_tried += upwards[position:]
                if ends_at < request.ends_at:
                    answer.facts["cut_short_at_tokens"] = request.run_tokens
                break
            # Half of a size's share is for its speed; its heaviest micro-batches take the rest.
            share = (ends_at - began) / (len(upwards) - position + 1)
            point = look(budget, share / 2)
            if position + 1 < len(upwards):
                expected = _GROWTH_RESERVE * (time.time() - began) * upwards[position + 1] / budget
            if not point.fits:
                break
            first_fits = True
            # By the speed that was measured: in a short run a better size saves less than it takes to find.
            run_seconds = request.run_tokens / (point.tokens_per_second or math.inf)
            ends_at = min(request.ends_at, request.began_at + PLANNING_SHARE * run_seconds)
        # Checkpointing costs time at every size, so it is tried only where the first size does not fit without.
        if first_fits:
            break
        for budget in reversed(request.budgets[: request.start]):
            if time.time() > request.ends_at:
                break
            if look(budget, _SPEED_SECONDS[0]).fits:
                break


def run_probe(request: ProbeRequest, *, on_answer: Callable[[ProbeAnswer], None]) -> ProbeAnswer:
    """Load the model and measure.

    Args:
        request: what is to be measured.
        on_answer: receives the answer so far, again and again.

    Raises:
        UserError: the model cannot be loaded with these settings.
    """
    answer = ProbeAnswer()
    settings = request.settings
    apply_backend(**request.backend.model_dump(exclude={"variables"}))
    table = open_split(request.tokens, "train")
    began = time.time()
    ready, batching, choices = _set_up(settings, table)
    restore_collection()
    gc.freeze()  # what is loaded stays, and is not searched again before and after each size
    probe = BudgetProbe(ready, settings, table, batching)
    reading, held = read_memory(settings.device), probe.held
    answer.facts = PlanFacts(
        device=reading.name,
        total_bytes=reading.total,
        other_programs_bytes=reading.others,
        memory_fraction=settings.train.memory_fraction,
        batching=batching,
        choices=choices,
        longest_row_tokens=int(table.lengths.max(initial=0)),
        load_seconds=round(time.time() - began, 2),
        weights_bytes=held.weights,
        gradients_bytes=held.gradients,
        optimizer_state_bytes=held.optimizer_state,
        optimizer_extra_bytes=held.optimizer_extra,
        buffers_bytes=held.buffers,
    )
    on_answer(answer)
    probe_budgets(request, probe, answer, lambda: on_answer(answer))
    answer.finished = True
    on_answer(answer)
    return answer


def _set_up(settings: TrainingSettings, table: TokenTable) -> tuple[ReadyModel, Batching, dict[str, str]]:
    """Set the model up as training does, but for what changes neither speed nor memory and takes long."""
    from lm_tuning.training.kernels.fast_path import prepare_fast_path
    from lm_tuning.training.setup.model import set_up_model

    # Decomposing every weight takes up to minutes, and leaves matrices of the same shapes.
    lora = settings.train.lora.model_copy(update={"init": "default"})
    settings = replace(settings, train=settings.train.model_copy(update={"lora": lora}))
    ready = set_up_model(settings)
    fast = prepare_fast_path(ready, settings, table)
    return ready, fast.batching, fast.facts


def try_budget(probe: BudgetProbe, answer: ProbeAnswer, point: ProbePoint, *, seconds: float) -> ProbePoint:
    """Measure a budget, or leave it out when the smaller ones let expect that it does not fit.

    Args:
        probe: of the model, as the point says it runs.
        answer: of the points before; the point is added to it.
        point: says what is to be measured; the rest is filled in.
        seconds: for the speed, within bounds.

    Returns:
        The point.
    """
    device, budget = probe.settings.device, point.micro_batch_tokens
    reading = read_memory(device)
    limit = probe.settings.train.memory_fraction * reading.total
    answer.points.append(point)
    known = [
        (each.micro_batch_tokens, each.predicted_total_bytes)
        for each in answer.points
        if each.outcome == "measured"
        and each.gradient_checkpointing == point.gradient_checkpointing
        and each.predicted_total_bytes
    ]
    smaller = [entry for entry in known if entry[0] < budget]
    if smaller:
        base = _with_optimizer(reading.used + reading.others, probe.held)
        point.predicted_total_bytes = extrapolate(smaller, base=base, at=budget)
        if point.predicted_total_bytes > limit:
            return point
    least, most = _SPEED_SECONDS
    # Said behind the block and not inside it: there the exception still holds the failed micro-batch's tensors.
    failed = False
    try:
        speed, peak, taken = probe.measure(budget, seconds=min(max(seconds, least), most))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)
        failed = True
    if failed:
        point.outcome, point.predicted_total_bytes = "out of memory", None
    else:
        total = _with_optimizer(taken + read_memory(device).others, probe.held)
        point.outcome, point.tokens_per_second, point.peak_memory_bytes = "measured", speed, peak
        point.predicted_total_bytes, point.fits = total, total <= limit
    reset_peak(device)
    return point


def _with_optimizer(taken: int, held: ModelBytes) -> int:
    """Add the optimizer; what it needs while it makes a step takes the place of activations that are gone by then."""
    stepping = held.weights + held.buffers + held.gradients + held.optimizer_extra
    return max(taken, stepping) + held.optimizer_state


def switch_checkpointing(model: Any, wanted: bool) -> None:
    """Switch gradient checkpointing on or off, as the Trainer switches it on.

    Args:
        model: with adapters or not.
        wanted: whether gradient checkpointing is on.
    """
    if wanted:
        model.activation_checkpointing_enable()
    elif getattr(model, "is_activation_checkpointing", False):
        model.activation_checkpointing_disable()


def reset_peak(device: str) -> None:
    """Free what nobody holds and forget the most that was held.

    Args:
        device: ``cpu`` or ``cuda``.
    """
    # Cycles keep tensors alive until they are collected, and blocks with them.
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return
    try:
        # 5 sets the high-water mark of resident memory (VmHWM) back to what is resident now.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return  # the peak then never falls, and budgets grow anyway


def read_peaks(device: str) -> tuple[int, int]:
    """Return the most bytes that tensors held (the process on a CPU), and the most taken of the device.

    Args:
        device: ``cpu`` or ``cuda``.
    """
    if device == "cuda":
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        [peak] = (int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
    except (OSError, ValueError):
        peak = read_memory(device).peak
    return peak, peak


def main(arguments: Sequence[str]) -> int:
    """Read a request, write answers.

    Args:
        arguments: path of the request, path of the answer.

    Returns:
        0, also when the answer holds an error.
    """
    # Until the model is there: packages leave many objects when they load, and hardly a cycle.
    collect_rarely()
    request_path, answer_path = map(Path, arguments)
    request: ProbeRequest = pickle.loads(request_path.read_bytes())  # noqa: S301 - written by the training itself
    answer = ProbeAnswer()

    def write(latest: ProbeAnswer) -> None:
        nonlocal answer
        answer = latest
        write_json_atomic(answer_path, asdict(latest))

    try:
        run_probe(request, on_answer=write)
    except UserError as error:
        answer.error = " ".join(error.problems)
    except Exception as error:
        traceback.print_exc()
        answer.error = f"{type(error).__name__}: {error}"
    write(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
