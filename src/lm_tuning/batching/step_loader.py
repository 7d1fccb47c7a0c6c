"""The loader of steps: worker processes build them while the device works on the ones before."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from lm_tuning.batching.batch import StepBatch, StepDataset
from lm_tuning.batching.lost_worker import find_lost_worker


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
