"""What stands in for CUDA graphs on a CPU: a replay makes the pass again and writes into the tensors of the first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lm_tuning.training.kernels.recording import Outputs


@dataclass
class CalledAgain:
    """A pass that is called again."""

    run: Callable[[], Outputs]
    outputs: Outputs
    reference: Outputs | None
    num_replays: int = 0

    def replay(self) -> None:
        """Make the pass, and write where the first one wrote."""
        self.num_replays += 1
        for into, value in zip(self.outputs, self.run(), strict=True):
            assert (into is None) == (value is None), "the same parameters take part"
            if into is not None and value is not None:
                assert into.shape == value.shape, "a graph has one shape"
                into.copy_(value)


@dataclass
class CallingRecorder:
    """Records nothing, and calls again.

    Attributes:
        spoil: changes what a replay has written, to play a recording that computes something else.
        failure: raised instead of recording.
        lack: what is said of the memory.
    """

    spoil: Callable[[Outputs], object] = lambda outputs: None
    failure: Exception | None = None
    lack: str | None = None
    recordings: list[CalledAgain] = field(default_factory=list)
    num_cleared: int = 0

    def record(self, run: Callable[[], Outputs]) -> CalledAgain:
        """Make the pass once, as it is made before a recording."""
        reference = run()
        if self.failure is not None:
            raise self.failure

        def spoiled() -> Outputs:
            outputs = run()
            self.spoil(outputs)
            return outputs

        written: Outputs = [None if part is None else torch.full_like(part, float("nan")) for part in reference]
        self.recordings.append(CalledAgain(spoiled, written, reference))
        return self.recordings[-1]

    def synchronize(self) -> None:
        """A CPU has done what it was told."""

    def random_state(self) -> torch.Tensor:
        """Return the state of the CPU's generator."""
        return torch.get_rng_state()

    def describe_lack_of_memory(self) -> str | None:
        """Say what the test wants said."""
        return self.lack

    def clear(self) -> None:
        """Count."""
        self.num_cleared += 1
