"""Profile a few steps of a training as it would really run, and describe what the profiler saw.

Nothing is left behind but the measurement: figures, and a report of which the terminal shows one table.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lm_tuning.errors import Interrupted
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.reporting.document import Code, Item, Items, Paragraph, Report, Section, Table
from lm_tuning.reporting.text import keep_ends, write_number
from lm_tuning.runtime.device import describe_device
from lm_tuning.runtime.ranges import STEP_RANGE
from lm_tuning.text.store.table import open_split
from lm_tuning.training.profile.trace import TraceTable, read_trace
from lm_tuning.training.records import ProfileFigures
from lm_tuning.training.run import run_training
from lm_tuning.training.settings import TrainingPaths, TrainingSettings, step_plan_of
from lm_tuning.wording import count_of

logger = logging.getLogger(__name__)

TRACE_NAME = "trace.json.gz"
NUM_STEPS = 3
NUM_WARM_UP_STEPS = 5
PROGRESS_LABEL = "Warm-up and profiling"

_NUM_OPERATIONS = 25
_NAME_CHARACTERS = 90


@dataclass(frozen=True)
class TrainingProfile:
    """What the profiler saw of some steps.

    Attributes:
        table: the device's work, summed up.
        trace: the trace itself, a gzipped Chrome trace.
        tokens_per_second: real tokens, the median of the steps before the profiler ran, without the first; ``None``
            where there were too few.
        num_warm_up_steps: steps before the profiled ones.
    """

    table: TraceTable
    trace: Path
    tokens_per_second: float | None
    num_warm_up_steps: int


def profile_training(
    paths: TrainingPaths,
    settings: TrainingSettings,
    *,
    folder: Path,
    num_steps: int = NUM_STEPS,
    num_warm_up_steps: int = NUM_WARM_UP_STEPS,
    on_progress: OnProgress = ignore_progress,
) -> TrainingProfile:
    """Run the first steps of a training as it would really run, and profile the last of them.

    The run is laid out in full, so that what depends on its length, such as the learning rate and whether compiling
    pays, is decided as for the real one; it ends after the profiled steps. Nothing is evaluated or saved, and
    checkpoints are neither read nor written. A batch plan is taken from where the training keeps it, and kept there.

    Args:
        paths: tokens to read, and where batch plans lie.
        settings: of the training to profile.
        folder: where the trace goes; made if missing.
        num_steps: steps to profile. A trace of a step holds every operation of each of its micro-batches.
        num_warm_up_steps: steps before them, in which memory is reserved and layers are compiled; at least 2.
        on_progress: receives the steps done.

    Raises:
        UserError: the training cannot be run as it is set.
        Interrupted: a signal asked to stop.
    """
    assert num_steps >= 1 and num_warm_up_steps >= 2, (num_steps, num_warm_up_steps)
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / TRACE_NAME
    needed = num_warm_up_steps + num_steps + 1  # metrics of the last one come at the end of a further step
    train = settings.train.model_copy(
        update={
            "save_every_steps": None,
            "eval_every_steps": None,
            "early_stopping_evals": None,
            "load_best": False,
            "resume": False,
            "health": settings.train.health.model_copy(update={"probe": False}),
        }
    )
    total_steps = step_plan_of(settings, open_split(paths.tokens, "train")).total_steps
    if total_steps < needed:
        # A warm-up longer than the few steps of a profile would be refused.
        trainer = {**train.trainer, "warmup_steps": 0}
        train = train.model_copy(update={"num_epochs": None, "max_steps": needed, "trainer": trainer})
        total_steps = needed
    settings = replace(settings, train=train, run_id=None)
    # A plan that is made for the profile is the training's own, so it is kept beside the training's, not in scratch.
    plans = paths.plans or paths.checkpoints / "batch_plans"
    num_run = num_warm_up_steps + num_steps
    # Lines of the training count its own steps, so both totals are named before either is seen.
    logger.info(
        "The profile runs the first %d of %d training steps: %d to warm up, then %d under the profiler.",
        num_run,
        total_steps,
        num_warm_up_steps,
        num_steps,
    )
    recorder = _StepRecorder(trace, settings.device, num_steps, num_warm_up_steps)

    def show(what: str, done: int, total: int | None, unit: str) -> None:
        """Count the steps of the profile, not those that the whole training would have."""
        if what == "Training":
            on_progress(PROGRESS_LABEL, done, num_run, unit)
        else:
            on_progress(what, done, total, unit)

    with tempfile.TemporaryDirectory(dir=folder, prefix=".run-") as scratch:
        try:
            run_training(
                TrainingPaths(tokens=paths.tokens, checkpoints=Path(scratch), plans=plans),
                settings,
                on_progress=show,
                on_metrics=recorder,
            )
        except _EnoughSeen:
            on_progress(PROGRESS_LABEL, num_run, num_run, "steps")
        except Interrupted as stop:
            raise Interrupted(stop.signal_name, "The profile was not finished, and nothing of it is kept.") from stop
        finally:
            recorder.stop()
    table = read_trace(trace)
    warm = recorder.speeds[1:]  # the first step has one-time set-up in it
    return TrainingProfile(
        table=table,
        trace=trace,
        tokens_per_second=statistics.median(warm) if warm else None,
        num_warm_up_steps=num_warm_up_steps,
    )


@dataclass
class _StepRecorder:
    """Receive the metrics of a training, which come as a step ends, and profile the steps after the first ones.

    Metrics come one step late: those of step n at the end of step n + 1.
    """

    trace: Path
    device: str
    num_steps: int
    num_warm_up_steps: int
    speeds: list[float] = field(default_factory=list)
    num_ended: int = 1
    _profiler: Any = None
    _range: Any = None

    def __call__(self, step: int, metrics: dict[str, float]) -> None:
        """Note that a step has ended.

        Raises:
            _EnoughSeen: the last one to profile has.
        """
        if "tokens_per_second" not in metrics:
            return  # an evaluation's
        self.num_ended += 1
        # A step under the profiler is slower, so its speed says nothing of the training.
        if self._profiler is None:
            self.speeds.append(metrics["tokens_per_second"])
        if self.num_ended == self.num_warm_up_steps:
            self._start()
        elif self._profiler is not None:
            self._end_step()
            if self.num_ended == self.num_warm_up_steps + self.num_steps:
                self._finish()
                raise _EnoughSeen
            self._begin_step()

    def stop(self) -> None:
        """Switch the profiler off when the training has ended on its own, as by an error."""
        if self._profiler is not None:
            self._end_step()
            with _without_profiler_warning():
                self._profiler.stop()
            self._profiler = None

    def _start(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        # The host too on a GPU: its operations say what the kernels that they queue are for.
        activities = [ProfilerActivity.CPU]
        if self.device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._wait_for_device()
        self._profiler = profile(activities=activities)
        with _without_profiler_warning():
            self._profiler.start()
        self._begin_step()

    def _finish(self) -> None:
        self._wait_for_device()
        # Forgotten before it is stopped: an error in stopping must not make `stop` try it again.
        profiler, self._profiler = self._profiler, None
        with _without_profiler_warning():
            profiler.stop()
        profiler.export_chrome_trace(str(self.trace))

    def _begin_step(self) -> None:
        from torch.profiler import record_function

        self._range = record_function(f"{STEP_RANGE} {self.num_ended + 1}")
        self._range.__enter__()

    def _end_step(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _wait_for_device(self) -> None:
        """Let work that was queued before be over: only here, where the profile begins and ends."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()


class _EnoughSeen(Exception):  # ends a training that has served its purpose; no error
    """End the training from within."""


@contextmanager
def _without_profiler_warning() -> Iterator[None]:
    """Hide what torch 2.11 warns of at every use: that earlier cycles are forgotten. Here there is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning: Profiler clears events at the end of each cycle")
        yield


def run_facts(settings: TrainingSettings) -> dict[str, str]:
    """Return what the report says of the training that was profiled.

    Args:
        settings: of the training.
    """
    return {
        "model": settings.base["name_or_path"],
        "method": f"{settings.train.method}, {settings.weights_dtype} weights, {settings.compute_dtype} arithmetic",
        "device": describe_device().name,
    }


def profile_figures(profile: TrainingProfile) -> ProfileFigures:
    """Return the figures of a profile.

    Args:
        profile: see :func:`lm_tuning.training.profile.profiling.profile_training`.

    Returns:
        ``metrics`` with one number each for tracking, and ``operations``, one row each, the longest first.
    """
    table = profile.table
    groups = {
        f"{group.replace(' ', '_').replace('-', '_')}_fraction": seconds / table.seconds
        for group, seconds in table.seconds_by_group().items()
    }
    return {
        "metrics": {
            "profile": {
                "num_steps": table.num_steps,
                "step_seconds": table.seconds / max(table.num_steps, 1),
                "tokens_per_second_before": profile.tokens_per_second,
                "idle_fraction": table.idle_fraction,
                **groups,
            }
        },
        "measured_on": "gpu" if table.on_gpu else "cpu",
        "operations": [
            {
                "name": operation.name,
                "group": operation.group,
                # A trace counts nanoseconds; what stands behind them is noise of the division.
                "seconds": round(operation.seconds, 9),
                "fraction": operation.seconds / table.seconds,
                "count": operation.count,
            }
            for operation in table.operations
        ],
    }


def tabulate_groups(table: TraceTable) -> Table:
    """Return where the time went: group of operations, share, milliseconds and operations per step.

    Args:
        table: of a profile. The time without any operation comes last.
    """
    counts: Counter[str] = Counter()
    for operation in table.operations:
        counts[operation.group] += operation.count
    steps = max(table.num_steps, 1)
    rows = [
        (group, f"{seconds / table.seconds:.1%}", _milliseconds(seconds, steps), write_number(counts[group] / steps, 0))
        for group, seconds in table.seconds_by_group().items()
    ]
    idle = table.idle_fraction
    what = "no kernel ran" if table.on_gpu else "outside of operations (Python)"
    rows.append((what, f"{idle:.1%}", _milliseconds(idle * table.seconds, steps), ""))
    return Table("", ("work", "share", "ms per step", "operations per step"), rows)


def compose_report(profile: TrainingProfile, facts: Mapping[str, str]) -> Report:
    """Lay out the whole report.

    Args:
        profile: see :func:`lm_tuning.training.profile.profiling.profile_training`.
        facts: what was profiled and where, a text by name.
    """
    table = profile.table
    steps = max(table.num_steps, 1)
    before = count_of(profile.num_warm_up_steps, "warm-up step")
    measured = (
        f"profiled: {count_of(table.num_steps, 'step')} of {1000 * table.seconds / steps:,.1f} ms, profiler included; "
        f"the {before} before ran at {write_number(profile.tokens_per_second, 0)} real tokens per second"
    )
    done_by = "The GPU's time, kernel by kernel" if table.on_gpu else "The processor's time, operation by operation"
    shares = f"{done_by}; shares are of the {table.seconds:,.2f} s of all profiled steps."
    if table.on_gpu:
        shares += " Kernels that run side by side make the shares add up to more than 100 %."
    longest = Table(
        "",
        ("operation", "work", "share", "ms per step", "times per step"),
        [
            (
                Code(keep_ends(operation.name, _NAME_CHARACTERS)),
                operation.group,
                f"{operation.seconds / table.seconds:.1%}",
                _milliseconds(operation.seconds, steps),
                write_number(operation.count / steps, 1),
            )
            for operation in table.operations[:_NUM_OPERATIONS]
        ],
        text_columns=(0, 1),
    )
    return Report(
        "Profile of a training",
        summary=[Items([*(Item(f"{name}: {value}") for name, value in facts.items()), Item(measured)])],
        sections=[
            Section("groups", "Where the time went", [Paragraph(shares), tabulate_groups(table)]),
            Section("operations", f"The {_NUM_OPERATIONS} longest operations", [longest]),
            Section("trace", "The trace", [_how_to_open(profile.trace.name)]),
        ],
    )


def _how_to_open(trace: str) -> Paragraph:
    return Paragraph(
        (
            Code(trace),
            " beside this file holds every operation with its time. Open ",
            Code("https://ui.perfetto.dev"),
            " and drop the file on it: it stays in the browser. The ranges ",
            *(Code("training step"), ", ", Code("forward"), ", ", Code("backward"), " and ", Code("optimizer")),
            " say where in a step you are.",
        )
    )


def _milliseconds(seconds: float, steps: int) -> str:
    return write_number(1000 * seconds / steps, 2)
