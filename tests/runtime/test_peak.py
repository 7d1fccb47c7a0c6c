from __future__ import annotations

import gc

import pytest
import torch

from lm_tuning.runtime import peak
from lm_tuning.runtime.peak import find_ceiling, known_peak, measure_matmul


@pytest.mark.parametrize(
    ("name", "bfloat16", "tf32", "float32"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5, 494.5, 67),
        ("NVIDIA H100 PCIe", 756.5, 378, 51),
        ("NVIDIA H100 NVL", 835.5, 417.5, 60),
        ("NVIDIA H200", 989.5, 494.5, 67),
        ("NVIDIA A100-SXM4-80GB", 312, 156, 19.5),
        ("NVIDIA A100 80GB PCIe", 312, 156, 19.5),
        ("NVIDIA A10", 125, 62.5, 31.2),
        ("NVIDIA A10G", 70, 35, 31.5),
        ("NVIDIA A40", 149.7, 74.8, 37.4),
        ("NVIDIA RTX A6000", 154.8, 77.4, 38.7),
        ("NVIDIA L4", 121, 60, 30.3),
        ("NVIDIA L40S", 362, 183, 91.6),
        ("NVIDIA GeForce RTX 3090", 71, 35.6, 35.6),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6, 82.6),
        ("NVIDIA GeForce RTX 5090", 209.5, 104.8, 104.8),
        ("NVIDIA RTX 6000 Ada Generation", 364.2, 182.1, 91.1),
        ("NVIDIA B200", 2250, 1125, 75),
        ("Tesla V100-SXM2-32GB", None, None, 15.7),
        ("Tesla T4", None, None, 8.1),
    ],
)
def test_a_card_is_known_by_the_name_that_the_driver_gives(name, bfloat16, tf32, float32):
    for dtype, teraflops in (("bfloat16", bfloat16), ("tf32", tf32), ("float32", float32)):
        expected = None if teraflops is None else pytest.approx(teraflops * 1e12)
        assert known_peak(name, dtype) == expected
    assert known_peak(name, "float16") is not None


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "AMD Instinct MI300X",
        "CPU",
        "",
    ],
)
def test_a_card_that_is_not_in_the_table_has_no_peak(name):
    assert known_peak(name, "bfloat16") is None


def test_the_fastest_product_counts_and_small_ones_are_made_for_a_while(monkeypatch):
    """Exact, by a clock of its own: products timed by hand beside other programs tell nothing."""
    seconds = [8e-3, 2e-3, 5e-3, 3e-3, 4e-3, 9e-3]  # more than three products, and 20 ms, after the fifth
    ticks = iter([tick for took in seconds for tick in (0.0, took)])
    monkeypatch.setattr(peak.time, "perf_counter", lambda: next(ticks))
    assert peak._time_on_host(torch.device("cpu"), torch.float32, 8) == 2e-3
    assert list(ticks) == [0.0, 9e-3]


@pytest.mark.parametrize(
    ("seconds", "tried"),
    [
        ({256: 1e-3, 512: 4e-3, 1024: 9e-3, 2048: 80e-3}, [256, 512, 1024, 2048]),
        ({256: 10e-3, 512: 11e-3, 1024: 16e-3, 2048: 50e-3}, [256, 512, 1024, 2048]),  # threads wait for other programs
        ({256: 10e-3, 512: 80e-3, 1024: 640e-3}, [256, 512]),  # a slow processor
    ],
)
def test_sizes_grow_while_there_is_time_and_the_fastest_counts(monkeypatch, seconds, tried):
    clock, seen = [0.0], []

    def timed(device, dtype, size):
        seen.append(size)
        clock[0] += 4 * seconds[size]  # as many products as are made of each
        return seconds[size]

    monkeypatch.setattr(peak, "_time_on_host", timed)
    monkeypatch.setattr(peak.time, "perf_counter", lambda: clock[0])
    assert measure_matmul("cpu", torch.float32) == pytest.approx(max(2 * size**3 / seconds[size] for size in tried))
    assert seen == tried


def test_the_factors_are_random_and_the_runs_random_state_stays():
    before = torch.random.get_rng_state()
    left, right = peak._factors(torch.device("cpu"), torch.float32, 64)
    assert left.std() > 0.5 and right.std() > 0.5 and not torch.equal(left, right)
    measure_matmul("cpu", torch.float32)
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_ceiling_of_a_cpu_is_measured_once_and_not_known():
    first = find_ceiling("cpu", "float32")
    assert (first.device, first.dtype, first.known_flops) == ("CPU", "float32", None)
    assert first.measured_flops > 1e8
    assert find_ceiling("cpu", "float32") == first


def allocated_bytes() -> int:
    """Count what tensors hold on the GPU, with the workspace that cuBLAS keeps after its first product."""
    small = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
    torch.mm(small, small)
    del small
    torch.cuda.synchronize()
    gc.collect()
    return torch.cuda.memory_allocated()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_attains_a_good_part_of_its_peak_and_no_more():
    peak._measure_once.cache_clear()  # another test may have measured, and what is known is not measured again
    before = allocated_bytes()
    ceiling = find_ceiling("cuda", "bfloat16")
    assert ceiling.measured_flops > 1e12
    if ceiling.known_flops is not None:
        assert 0.4 < ceiling.measured_flops / ceiling.known_flops < 1.02
    assert allocated_bytes() == before  # the matrices are gone
