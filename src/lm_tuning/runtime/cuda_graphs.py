"""Record what a CUDA device is given into a graph, and leave the device as it was where that fails."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

# Recordings that failed. PyTorch's allocator of pinned memory cannot be told that they have ended, and asks each of
# them at every further recording whether memory is for it: they must not be deleted. There are a few at most.
_FAILED: list[torch.cuda.CUDAGraph] = []


@contextmanager
def recording_into(
    graph: torch.cuda.CUDAGraph, *, generators: Sequence[torch.Generator] = (), **options: Any
) -> Iterator[None]:
    """Record the block into a graph.

    Args:
        graph: an empty one.
        generators: of random numbers that the block draws from, beside the device's own.
        **options: ``pool`` and ``stream`` of ``torch.cuda.graph``. A pool takes no further recording after one that
            failed; what was recorded into it before stays good.

    Raises:
        Exception: what ended the recording. The current stream is then what it was, all generators draw again, and
            memory is handed out and back as before.
    """
    stream = torch.cuda.current_stream()
    # Named here, since a graph does not tell its pool before its recording has ended.
    options.setdefault("pool", torch.cuda.graph_pool_handle())
    failure: Exception | None = None
    # A tensor that the collector frees while recording would be freed within the graph.
    collects = gc.isenabled()
    gc.disable()
    try:
        with _graph_of(graph, generators, options):
            try:
                yield
            except Exception as error:
                failure = error
                raise
    except Exception as error:
        # A recording that failed is not left: its stream stays the current one.
        torch.cuda.set_stream(stream)
        _give_up(graph, options["pool"])
        _repair_random_states(generators, options)
        # What ended the recording, not that it then could not be ended.
        raise failure or error from None
    finally:
        if collects:
            gc.enable()


def _graph_of(graph: torch.cuda.CUDAGraph, generators: Sequence[torch.Generator], options: dict[str, Any]) -> Any:
    for generator in generators:
        graph.register_generator_state(generator)
    # Other threads go on: those that pin memory or sample the card would end a recording of the whole process.
    return torch.cuda.graph(graph, capture_error_mode="thread_local", **options)


def _give_up(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """End a failed recording's use of its memory pool.

    PyTorch 2.11 raises before it comes to that. The allocator then takes a recording to be under way for good: it hands
    no cached memory back to the device.
    """
    graph.reset()
    _FAILED.append(graph)
    device = torch.cuda.current_device()
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError as error:
        if "not currently recording" not in str(error):
            raise
        return  # other versions have ended it themselves
    # A graph that was not recorded to its end does not do this when it is deleted.
    torch._C._cuda_releasePool(device, pool)


def _repair_random_states(generators: Sequence[torch.Generator], options: dict[str, Any]) -> None:
    """Record next to nothing: a generator whose recording failed refuses to draw until another one has ended."""
    number = torch.zeros((), device="cuda")
    # Into a pool of its own, which goes with this graph.
    stream = {name: value for name, value in options.items() if name == "stream"}
    with _graph_of(torch.cuda.CUDAGraph(), generators, stream):
        number.add_(1)
