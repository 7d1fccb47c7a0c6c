"""The loader of steps: worker processes build them while the device works on the ones before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.utils.data import DataLoader

from lm_tuning.training.batches import StepBatch, StepDataset


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
            # Its own generator: drawing the workers' seed must not move the run's random state.
            generator=torch.Generator().manual_seed(0),
        )

    def __len__(self) -> int:
        """Return the steps of the whole run."""
        return len(self.dataset)

    def __iter__(self) -> Iterator[StepBatch]:
        """Go through the steps that are left."""
        return iter(self._loader)
