"""A recording that fails leaves stream, random numbers and the garbage collector as they were."""

from __future__ import annotations

import gc

import pytest
import torch

from lm_tuning.runtime.cuda_graphs import recording_into
from lm_tuning.training.kernels.recording import CudaRecorder, Outputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_what_is_recorded_is_replayed_with_other_random_numbers() -> None:
    graph, generator = torch.cuda.CUDAGraph(), torch.Generator("cuda").manual_seed(1)
    drawn = torch.zeros(8, device="cuda")
    with recording_into(graph, generators=[generator]):
        drawn.exponential_(generator=generator)
    graph.replay()
    first = drawn.clone()
    graph.replay()
    assert (drawn > 0).all()
    assert not torch.equal(first, drawn)


@pytest.mark.parametrize("with_stream", [False, True])
def test_a_recording_that_fails_says_why_and_leaves_everything_as_it_was(with_stream: bool) -> None:
    generator, number = torch.Generator("cuda").manual_seed(1), torch.rand(4, device="cuda")
    stream = torch.cuda.current_stream()
    for _ in range(2):
        options = {"pool": torch.cuda.graph_pool_handle(), "stream": torch.cuda.Stream()} if with_stream else {}
        with (
            pytest.raises(RuntimeError, match="capturing"),
            recording_into(torch.cuda.CUDAGraph(), generators=[generator], **options),
        ):
            number.exponential_(generator=generator)
            torch.rand(4, device="cuda")
            number.sum().item()
        assert torch.cuda.current_stream() == stream
        assert gc.isenabled()
        assert (number.exponential_(generator=generator) > 0).all()
        assert torch.rand(4, device="cuda").isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with recording_into(graph, generators=[generator]):
        number.exponential_(generator=generator).add_(1)
    graph.replay()
    assert (number > 1).all()


def test_memory_of_a_recording_that_failed_goes_back_to_the_device() -> None:
    size = 64 * 2**20
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="capturing"), recording_into(torch.cuda.CUDAGraph()):
            torch.empty(size, dtype=torch.uint8, device="cuda").sum().item()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() < before + size
    # The allocator does not take a recording to be under way, which would keep what is freed from now on.
    ballast = torch.empty(size, dtype=torch.uint8, device="cuda")
    del ballast
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < before + size


def test_a_recorder_goes_on_after_a_recording_that_failed() -> None:
    recorder = CudaRecorder()
    number = torch.zeros(4, device="cuda")
    wanted = torch.ones(4, device="cuda")

    def add() -> Outputs:
        number.add_(wanted)
        return [number]

    def ask() -> Outputs:
        number.sum().item()
        return [number]

    kept = recorder.record(add)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="capturing"):
            recorder.record(ask)
    later = recorder.record(add)
    number.zero_()
    for recording in (kept, later, kept):
        recording.replay()
    assert (number == 3).all()
