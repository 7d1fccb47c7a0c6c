"""Record a pass over tensors that stay where they are, to make it again at one launch."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lm_tuning.runtime.cuda_graphs import recording_into

# Share of the card's memory beyond which nothing is recorded: a graph holds the memory of its step for good.
_MOST_MEMORY = 0.45

Outputs = list[torch.Tensor | None]
"""Loss of a pass, then the gradient of each trained parameter, ``None`` for one that took no part."""


class Recording(Protocol):
    """A pass that can be made again.

    Attributes:
        outputs: tensors that each replay writes to.
        reference: what the pass computed without recording, on the same inputs.
    """

    outputs: Outputs
    reference: Outputs | None

    def replay(self) -> None:
        """Make the pass again, on what its inputs hold now."""


class Recorder(Protocol):
    """Makes recordings."""

    def record(self, run: Callable[[], Outputs]) -> Recording:
        """Record a pass.

        Args:
            run: makes the pass, on tensors that stay where they are; it is run once without recording before.
        """

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""

    def random_state(self) -> torch.Tensor:
        """Return the state that dropout draws from."""

    def describe_lack_of_memory(self) -> str | None:
        """Describe why a recording would take too much memory; ``None`` where it would not."""

    def clear(self) -> None:
        """Give memory of dropped recordings back."""


@dataclass
class _CudaRecording:
    graph: Any
    outputs: Outputs
    reference: Outputs | None

    def replay(self) -> None:
        self.graph.replay()


class CudaRecorder:
    """Records on the current CUDA device."""

    def __init__(self) -> None:
        """Make the stream and the pool that all recordings share: they are never replayed side by side."""
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool: Any = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Outputs]) -> Recording:
        """Record a pass; what makes that impossible is raised, and leaves the device as it was."""
        current = torch.cuda.current_stream()
        # Libraries prepare themselves at their first call on a stream, which must not be part of the recording.
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            reference = run()
        current.wait_stream(self._stream)
        torch.cuda.synchronize()
        # What is garbage now holds memory that the graph could have.
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        try:
            with recording_into(graph, pool=self._pool, stream=self._stream):
                outputs = run()
        except Exception:
            self._pool = torch.cuda.graph_pool_handle()  # the other one takes no further recording
            raise
        return _CudaRecording(graph, outputs, reference)

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def random_state(self) -> torch.Tensor:
        """Return the state of the device's generator."""
        return torch.cuda.get_rng_state()

    def describe_lack_of_memory(self) -> str | None:
        """Compare the most memory held so far with the card's."""
        share = torch.cuda.max_memory_allocated() / torch.cuda.get_device_properties().total_memory
        if share <= _MOST_MEMORY:
            return None
        return f"a step holds {share:.0%} of the card's memory, and its graph would hold as much again"

    def clear(self) -> None:
        """Empty the allocator's cache."""
        torch.cuda.empty_cache()


def find_recorder(device: str) -> Recorder | None:
    """Return what records passes on a device; ``None`` where nothing does.

    Args:
        device: ``cpu``, ``cuda`` or ``mps``.
    """
    return CudaRecorder() if device == "cuda" else None
