"""Load steps ahead while the device works on the ones before.

Worker processes build the steps. One that was killed is explained, since PyTorch reports it from wherever the run then
is.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from lm_tuning.batching.batch import StepBatch
from lm_tuning.batching.micro_batches import Batching
from lm_tuning.batching.step_plan import StepPlan
from lm_tuning.batching.tasks.base import TrainingTask
from lm_tuning.errors import MachineFault
from lm_tuning.text.store.table import TokenTable

_SAID_BY_PYTORCH = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\) "
    r"(?:is killed by signal: (?P<signal>[^.]+)|exited unexpectedly(?: with exit code (?P<code>\d+))?)"
)


class StepDataset(torch.utils.data.Dataset[StepBatch]):
    """Map a step number to its micro-batches; loader workers run this off the critical path."""

    def __init__(
        self, table: TokenTable, plan: StepPlan, task: TrainingTask, *, micro_batch_tokens: int, batching: Batching
    ) -> None:
        """Keep where the rows lie and how a step is split.

        Args:
            table: tokenized training rows.
            plan: which rows form each step.
            task: how rows become tensors.
            micro_batch_tokens: most positions of a micro-batch.
            batching: ``packed`` or ``padded``.
        """
        self.table = table
        self.plan = plan
        self.task = task
        self.batching: Batching = batching
        # Where worker processes see it change.
        self._micro_batch_tokens = torch.tensor(micro_batch_tokens, dtype=torch.int64)
        self._micro_batch_tokens.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def micro_batch_tokens(self) -> int:
        """Most positions of a micro-batch; steps that a loader prepared before a change keep the old number."""
        return int(self._micro_batch_tokens)

    @micro_batch_tokens.setter
    def micro_batch_tokens(self, tokens: int) -> None:
        self._micro_batch_tokens.fill_(tokens)

    def __len__(self) -> int:
        """Return the optimizer steps of the whole run."""
        return self.plan.total_steps

    def __getitem__(self, step: int) -> StepBatch:
        """Build the micro-batches of a 0-based optimizer step."""
        rows, budget = self.plan.rows_of_step(step), self.micro_batch_tokens
        # The budget is read once, so all micro-batches of a step are made for the same one.
        groups = self.task.split(self.table, rows, budget_tokens=budget, batching=self.batching)
        return StepBatch(
            step=step,
            # Of the input rows, not of this table: reports and messages name rows by them.
            row_ids=[int(row_id) for row_id in self.table.row_ids[rows]],
            micro_batches=[self.task.lay_out(self.table, group, batching=self.batching) for group in groups],
            micro_batch_tokens=budget,
        )


@dataclass
class StepLoader:
    """Give the Trainer a loader whose length is the whole run even when it starts in the middle."""

    dataset: StepDataset
    start_step: int
    num_workers: int
    pin_memory: bool
    prefetch_factor: int = 4
    _loader: DataLoader[StepBatch] = field(init=False)

    def __post_init__(self) -> None:
        """Make the loader; its workers start when it is first asked for a step."""
        several = self.num_workers > 0
        self._loader = DataLoader(
            self.dataset,
            batch_size=None,
            sampler=range(self.start_step, len(self.dataset)),
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            persistent_workers=several,
            prefetch_factor=self.prefetch_factor if several else None,
            worker_init_fn=_outlive_signals if several and hasattr(signal, "sigwaitinfo") else None,
            # Its own generator: drawing the workers' seed must not move the run's random state.
            generator=torch.Generator().manual_seed(0),
        )

    def __len__(self) -> int:
        """Return the steps of the whole run."""
        return len(self.dataset)

    def __iter__(self) -> Iterator[StepBatch]:
        """Go through the steps that are left."""
        return iter(self._loader)

    def close(self) -> None:
        """End the worker processes, which outlive the last step, and failed steps too.

        Nobody needs them any more, so that it does not matter here if one is gone already.
        """
        loader: Any = self._loader
        workers, loader._iterator = loader._iterator, None
        if hasattr(workers, "_shutdown_workers"):
            try:
                workers._shutdown_workers()
            except RuntimeError as error:
                if find_lost_worker(error) is None:
                    raise


def _outlive_signals(worker: int) -> None:
    """Let a worker go on when every process of a job is asked to stop: the training does so after the step in hand.

    PyTorch's own worker dies of a SIGTERM, which its training then takes for a crash, without a checkpoint. This one
    ends by its parent's SIGTERM, as PyTorch's does, and by the second one of anybody else.

    Args:
        worker: its number.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A handler would not learn who sends a signal. Blocked here and in all threads to come, it waits for the thread.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_when_told, args=(os.getppid(),), name="lm-tuning-signals", daemon=True).start()


def _end_when_told(parent: int) -> None:
    """Wait for signals, and end the process by the right one."""
    if signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        signal.sigwaitinfo({signal.SIGTERM})
    os._exit(0)


@dataclass(frozen=True)
class LostWorker:
    """What PyTorch knows of worker processes that are gone.

    Attributes:
        pids: as text, separated by commas.
        signal: the system's words for the signal that killed them, such as ``Killed``; ``None`` when not known.
        exit_code: with which they ended by themselves; ``None`` when not known.
    """

    pids: str
    signal: str | None
    exit_code: int | None


@contextmanager
def explain_lost_worker(describe_state: Callable[[], str], *, num_workers: int) -> Iterator[None]:
    """Turn PyTorch's report of a lost worker into a message that names the likely cause and the way on.

    Args:
        describe_state: returns how far the training is and how to go on, in whole sentences; asked for after a failure.
        num_workers: worker processes of the training.

    Raises:
        MachineFault: a worker was killed, or ended by itself.
    """
    try:
        yield
    except Exception as error:
        lost = find_lost_worker(error)
        if lost is None:
            raise
        raise MachineFault(f"{describe_lost_worker(lost, num_workers=num_workers)} {describe_state()}") from error


def find_lost_worker(error: BaseException | None) -> LostWorker | None:
    """Return which worker an error is about, or ``None`` when it has another cause.

    The report comes from a signal handler, so whatever ran at that moment may have wrapped it.

    Args:
        error: what ended a training.
    """
    while error is not None:
        said = _SAID_BY_PYTORCH.search(str(error)) if isinstance(error, RuntimeError) else None
        if said is not None:
            code = said["code"]
            name = said["signal"].strip() if said["signal"] else None
            return LostWorker(said["pids"], name, None if code is None else int(code))
        error = error.__cause__ or error.__context__
    return None


def describe_lost_worker(lost: LostWorker, *, num_workers: int, root: Path = Path("/")) -> str:
    """Describe which worker is gone, the likely cause and what to change.

    Args:
        lost: what is known.
        num_workers: worker processes of the training.
        root: folder that holds ``proc``.
    """
    several = "," in lost.pids
    subject = f"The loader workers {lost.pids} were" if several else f"The loader worker {lost.pids} was"
    setting = (
        f"train.num_loader_workers is {num_workers}; "
        f"{'fewer take less memory, and 0' if num_workers > 1 else '0'} prepares batches in the training process"
    )
    if lost.exit_code is not None:
        ended = subject.removesuffix(" was").removesuffix(" were")
        return f"{ended} ended with exit code {lost.exit_code}, by what it printed above or by foreign code. {setting}."
    if lost.signal == "Bus error":
        return (
            f"{subject} killed by the signal 'Bus error': the shared memory in /dev/shm is full. Enlarge it "
            f"(docker run --shm-size=8g). {setting}."
        )
    if lost.signal not in {None, "Killed"}:
        return f"{subject} killed by the signal '{lost.signal}'. {setting}."
    return (
        f"{subject} killed from outside. The likely cause is that the machine, or the container's limit, ran out of "
        f"memory{_describe_memory(root)}: the system then kills a process (see dmesg). {setting}."
    )


def _describe_memory(root: Path) -> str:
    """Describe how much memory the machine has available now; nothing where it does not tell."""
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return ""
    sizes = {name: int(size.split()[0]) / 2**20 for name, _, size in (line.partition(":") for line in lines) if size}
    if not {"MemAvailable", "MemTotal"} <= sizes.keys():
        return ""
    return f" (now {sizes['MemAvailable']:.1f} of the machine's {sizes['MemTotal']:.1f} GiB are available)"
