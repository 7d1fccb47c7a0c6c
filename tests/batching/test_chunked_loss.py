"""The loss of a head made in chunks is the loss of all its logits."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy

from lm_tuning.batching import losses as linear_loss
from lm_tuning.batching.head_loss import HeadLoss
from lm_tuning.batching.losses import sum_nats_in_chunks
from lm_tuning.text.store.table import IGNORE_INDEX


def make_parts(*, bias: bool, positions: int = 300) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(positions, 16, generator=random, requires_grad=True)
    weight = torch.randn(50, 16, generator=random, requires_grad=True)
    shift = torch.randn(50, generator=random, requires_grad=True) if bias else None
    targets = torch.randint(50, (positions,), generator=random)
    targets[::5] = IGNORE_INDEX
    return hidden, weight, shift, targets  # type: ignore[return-value]


def linear_sum_nats(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    smoothing: float = 0.0,
    dtype: torch.dtype = torch.float32,
    kernel: linear_loss.Kernel = linear_loss.plain_kernel,
) -> torch.Tensor:
    return linear_loss.linear_sum_nats(dtype, kernel)(hidden, weight, bias, targets, smoothing)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kernel", [linear_loss.plain_kernel, linear_loss._pointwise_kernel])
def test_loss_and_gradients_are_those_of_all_logits_at_once(
    monkeypatch: pytest.MonkeyPatch, smoothing: float, bias: bool, kernel: linear_loss.Kernel
) -> None:
    monkeypatch.setitem(linear_loss.CHUNK_BYTES, "cpu", 1)  # 128 positions a piece: three pieces, the last one short
    hidden, weight, shift, targets = make_parts(bias=bias)
    whole = cross_entropy(
        torch.nn.functional.linear(hidden, weight, shift),
        targets,
        ignore_index=IGNORE_INDEX,
        reduction="sum",
        label_smoothing=smoothing,
    )
    leaves = [hidden, weight] + ([shift] if bias else [])
    expected = torch.autograd.grad(whole / 7, leaves)
    ours = linear_sum_nats(hidden, weight, shift, targets, smoothing=smoothing, kernel=kernel)
    torch.testing.assert_close(ours, whole)
    for one, other in zip(torch.autograd.grad(ours / 7, leaves), expected, strict=True):
        torch.testing.assert_close(one, other)
    head = torch.nn.Linear(16, 50, bias=bias)
    head.weight = torch.nn.Parameter(weight.detach())
    head.bias = torch.nn.Parameter(shift.detach()) if bias else None
    implementation = linear_loss.linear_sum_nats(torch.float32, kernel)
    with torch.no_grad():
        measured = HeadLoss(head, "", implementation, torch.float32)(hidden, targets, label_smoothing=smoothing)
    torch.testing.assert_close(measured, whole)


def test_a_frozen_head_gets_no_gradient_and_costs_none() -> None:
    hidden, weight, _, targets = make_parts(bias=False)
    frozen = weight.detach()
    linear_sum_nats(hidden, frozen, None, targets).backward()
    assert frozen.grad is None
    assert hidden.grad is not None
    assert hidden.grad[0].abs().sum() == 0, "position 0 has no target"


def test_positions_without_any_target_cost_nothing() -> None:
    hidden, weight, _, targets = make_parts(bias=False)
    nats = linear_sum_nats(hidden, weight, None, torch.full_like(targets, IGNORE_INDEX))
    nats.backward()
    assert nats.item() == 0
    assert weight.grad is not None
    assert weight.grad.abs().sum() == 0


def test_no_more_than_a_chunk_of_logits_exists_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(linear_loss.CHUNK_BYTES, "cpu", 1)
    hidden, weight, _, targets = make_parts(bias=False)
    seen = []

    def kernel(logits: torch.Tensor, wanted: torch.Tensor, smoothing: float) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(tuple(logits.shape))
        return linear_loss.plain_kernel(logits, wanted, smoothing)

    linear_sum_nats(hidden, weight, None, targets, kernel=kernel)
    assert seen == [(128, 50), (128, 50), (44, 50)]


def test_products_in_16_bits_sum_in_float32() -> None:
    hidden, weight, _, targets = make_parts(bias=False, positions=2000)
    exact = linear_sum_nats(hidden, weight, None, targets)
    rounded = linear_sum_nats(hidden, weight, None, targets, dtype=torch.bfloat16)
    assert rounded.dtype == torch.float32
    assert float(rounded) == pytest.approx(float(exact), rel=2e-3)
    rounded.backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_any_head_can_be_run_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(linear_loss.CHUNK_BYTES, "cpu", 1)
    hidden, weight, _, targets = make_parts(bias=False)
    head = torch.nn.Sequential(torch.nn.Linear(16, 8, bias=False), torch.nn.Linear(8, 50))
    whole = cross_entropy(head(hidden), targets, ignore_index=IGNORE_INDEX, reduction="sum")
    expected = torch.autograd.grad(whole, [hidden, *head.parameters()])
    ours = sum_nats_in_chunks(head, hidden, targets, vocabulary=50)
    torch.testing.assert_close(ours, whole)
    for one, other in zip(torch.autograd.grad(ours, [hidden, *head.parameters()]), expected, strict=True):
        torch.testing.assert_close(one, other)
    assert weight.grad is None


def test_the_compiled_kernel_is_compiled_once_for_all_numbers_of_positions() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    kernel = partial(linear_loss.compiled_kernel, backend="eager")
    for positions in (300, 57, 128, 299, 2):
        hidden, weight, _, targets = make_parts(bias=False, positions=positions)
        plain = linear_sum_nats(hidden, weight, None, targets)
        expected = torch.autograd.grad(plain, [hidden, weight])
        ours = linear_sum_nats(hidden, weight, None, targets, kernel=kernel)
        torch.testing.assert_close(ours, plain)
        for one, other in zip(torch.autograd.grad(ours, [hidden, weight]), expected, strict=True):
            torch.testing.assert_close(one, other)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("vocabulary", "positions"),
    # Few positions of a large vocabulary in whole tiles; what a GPU makes many of, in what fills its processors.
    [(10_000_000, 128), (300_000, 1024), (151_936, 2048), (49_152, 6144)],
)
def test_chunks_are_of_whole_tiles(vocabulary: int, positions: int) -> None:
    size = linear_loss.chunk_positions(vocabulary, device="cuda", bytes_per_logit=2)
    assert size == positions
    assert size % 128 == 0
    assert linear_loss.chunk_positions(vocabulary, device="cuda", bytes_per_logit=2, num_chunk_sizes=2) >= size


def test_a_kernel_that_overwrites_the_logits_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(linear_loss.CHUNK_BYTES, "cpu", 1)
    hidden, weight, _, targets = make_parts(bias=False)

    def overwrite(logits: torch.Tensor, wanted: torch.Tensor, smoothing: float) -> tuple[torch.Tensor, torch.Tensor]:
        nats, gradient = linear_loss.plain_kernel(logits.clone(), wanted, smoothing)
        return nats, logits.copy_(gradient)

    plain = linear_sum_nats(hidden, weight, None, targets)
    wanted = torch.autograd.grad(plain, [hidden, weight])
    ours = linear_loss.linear_sum_nats(torch.float32, overwrite, is_in_place=True)(hidden, weight, None, targets, 0.0)
    torch.testing.assert_close(ours, plain)
    for one, other in zip(torch.autograd.grad(ours, [hidden, weight]), wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("vocabulary", [50, 4096, 9001])
def test_on_a_gpu_a_row_at_a_time_gives_loss_and_gradients(vocabulary: int, smoothing: float) -> None:
    from lm_tuning.batching.row_kernel import row_kernel

    random = torch.Generator(device="cuda").manual_seed(0)
    hidden = torch.randn(300, 64, generator=random, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(vocabulary, 64, generator=random, device="cuda", requires_grad=True)
    targets = torch.randint(vocabulary, (300,), generator=random, device="cuda")
    targets[::5] = IGNORE_INDEX
    plain = linear_loss.linear_sum_nats(torch.bfloat16)(hidden, weight, None, targets, smoothing)
    wanted = torch.autograd.grad(plain, [hidden, weight])
    implementation = linear_loss.linear_sum_nats(torch.bfloat16, row_kernel, is_in_place=True)
    ours = implementation(hidden, weight, None, targets, smoothing)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=0)
    for one, other in zip(torch.autograd.grad(ours, [hidden, weight]), wanted, strict=True):
        assert float((one - other).float().norm() / other.float().norm()) < 1e-2
    logits = torch.tensor([[1.0, float("nan"), 2.0]], device="cuda")
    nats, _ = row_kernel(logits, torch.tensor([0], device="cuda"), 0.0)
    assert bool(nats.isnan())  # what is not finite is found by the loss


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_row_at_a_time_can_be_recorded() -> None:
    from lm_tuning.batching.row_kernel import row_kernel
    from lm_tuning.runtime.cuda_graphs import recording_into

    implementation = linear_loss.linear_sum_nats(torch.bfloat16, row_kernel, is_in_place=True)
    random = torch.Generator(device="cuda").manual_seed(0)
    hidden = torch.randn(300, 64, generator=random, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(4096, 64, generator=random, device="cuda", requires_grad=True)
    targets = torch.randint(4096, (300,), generator=random, device="cuda")

    def run() -> tuple[torch.Tensor, ...]:
        nats = implementation(hidden, weight, None, targets, 0.0)
        return nats, *torch.autograd.grad(nats, [hidden, weight])

    run()  # compiled before it is recorded
    graph = torch.cuda.CUDAGraph()
    with recording_into(graph):
        recorded = run()
    targets.copy_(torch.randint(4096, (300,), generator=random, device="cuda"))
    targets[::5] = IGNORE_INDEX
    graph.replay()
    for one, other in zip(recorded, run(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
