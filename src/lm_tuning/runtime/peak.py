"""How fast a device multiplies matrices: what its datasheet promises, and what it attains here and now."""

from __future__ import annotations

import functools
import logging
import re
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_TERA = 1e12
_GPU_SIZE = 8192
_GPU_ROUNDS = 10
_GPU_WARM_UP_SECONDS = 0.1
_CPU_SIZES = (256, 512, 1024, 2048)
_CPU_ROUNDS = 3
_CPU_SIZE_SECONDS = 0.02
_CPU_BUDGET_SECONDS = 0.2

_FORMATS = ("bfloat16", "float16", "tf32", "float32")
# TFLOP/s without sparsity, with sums in float32, by dtype as in _FORMATS; None where the card has no such unit.
# float32 is that of the ordinary cores. Names are those that the driver gives, without NVIDIA, GeForce and Tesla.
_PEAKS: tuple[tuple[str, tuple[float | None, ...]], ...] = (
    (r"GB200.*", (2500, 2500, 1250, 80)),
    (r"B200.*", (2250, 2250, 1125, 75)),
    (r"H200 NVL", (835.5, 835.5, 417.5, 60)),
    (r"(H200|GH200 .*|H[18]00 (SXM5? )?\d+GB HBM[23]e?)", (989.5, 989.5, 494.5, 67)),
    (r"H100 NVL", (835.5, 835.5, 417.5, 60)),
    (r"H100 PCIe", (756.5, 756.5, 378, 51)),
    (r"A[18]00[ -].*", (312, 312, 156, 19.5)),
    (r"A40", (149.7, 149.7, 74.8, 37.4)),
    (r"A30", (165, 165, 82, 10.3)),
    (r"A10", (125, 125, 62.5, 31.2)),
    (r"A10G", (70, 70, 35, 31.5)),
    (r"RTX A6000", (154.8, 154.8, 77.4, 38.7)),
    (r"L4", (121, 121, 60, 30.3)),
    (r"L40", (181, 181, 90.5, 90.5)),
    (r"L40S", (362, 362, 183, 91.6)),
    (r"RTX 6000 Ada Generation", (364.2, 364.2, 182.1, 91.1)),
    (r"RTX 3090", (71, 71, 35.6, 35.6)),
    (r"RTX 3090 Ti", (80, 80, 40, 40)),
    (r"RTX 4090", (165.2, 165.2, 82.6, 82.6)),
    (r"RTX 5090", (209.5, 209.5, 104.8, 104.8)),
    (r"V100-SXM[23]-.*", (None, 125, None, 15.7)),
    (r"V100-PCIE-.*", (None, 112, None, 14)),
    (r"T4", (None, 65, None, 8.1)),
)


@dataclass(frozen=True)
class Ceiling:
    """The fastest that matrix products can be on a device.

    Attributes:
        device: name of the card, or ``CPU``.
        dtype: of the products: ``bfloat16``, ``float16``, ``tf32`` or ``float32``.
        known_flops: floating-point operations per second by the card's datasheet; ``None`` when it is not known.
        measured_flops: what a large product attained; ``None`` when it could not be measured.
    """

    device: str
    dtype: str
    known_flops: float | None
    measured_flops: float | None


def find_ceiling(device: str, compute_dtype: str) -> Ceiling:
    """Look a device up and measure it, once per process.

    On a GPU this takes a fraction of a second and up to 0.8 GB for that time: call it before the model is loaded.

    Args:
        device: ``cpu``, ``cuda`` or ``mps``.
        compute_dtype: type of the products: ``bfloat16``, ``float16`` or ``float32``.
    """
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else device.upper()
    # The product is measured in the dtype that is asked for, and looked up by what the switches make of it.
    dtype = _product_dtype(device, compute_dtype)
    measured = _measure_once(device, compute_dtype, dtype)
    return Ceiling(name, dtype, known_peak(name, dtype), measured)


@functools.cache
def _measure_once(device: str, compute_dtype: str, dtype: str) -> float | None:
    import torch

    try:
        return measure_matmul(device, getattr(torch, compute_dtype))
    except (RuntimeError, MemoryError) as error:  # running out of the GPU's memory is a RuntimeError
        logger.info("The speed of a %s product could not be measured: %s", dtype, str(error).partition("\n")[0])
        return None
    finally:
        if device == "cuda":
            # Neither the run's peak of memory nor what it can allocate should know of the matrices.
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def known_peak(name: str, dtype: str) -> float | None:
    """Return what the maker promises for dense matrix products.

    Args:
        name: of the card, as torch and the driver give it.
        dtype: ``bfloat16``, ``float16``, ``tf32`` or ``float32``; the last is that without tensor cores.

    Returns:
        Floating-point operations per second; ``None`` for a card that is not in the table, part of a card (MIG) and a
        format that it has no units for.

    Source:
        NVIDIA's datasheets of the data-centre cards, whose figures with sparsity are halved, and the white papers of
        Turing, Ampere (GA102), Ada and Blackwell for the others.
    """
    # The driver says "NVIDIA GeForce RTX 4090", torch the same, older drivers "Tesla V100-SXM2-16GB".
    short = re.sub(r"^(NVIDIA |GeForce |Tesla )+", "", name.strip())
    # A part of a card has a part of its units, which the name does not tell in a way that is the same everywhere.
    if " MIG " in short:
        return None
    for pattern, peaks in _PEAKS:
        if re.fullmatch(pattern, short):
            peak = peaks[_FORMATS.index(dtype)]
            return None if peak is None else peak * _TERA
    return None


def measure_matmul(device: str | torch.device, dtype: torch.dtype) -> float:
    """Measure how fast a large square matrix product is.

    The numbers are random: products of zeros draw less power, and a card runs them faster than any real one.

    Args:
        device: where.
        dtype: type of the matrices; float32 is multiplied as torch's switches say, see
            :mod:`lm_tuning.runtime.backend`.

    Returns:
        Floating-point operations per second, the median of a few products of 8192 by 8192 on a GPU; elsewhere the
        fastest of several smaller sizes; no further one is tried after a fifth of a second.
    """
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        return _measure_on_gpu(device, dtype)
    rate, began = 0.0, time.perf_counter()
    for size in _CPU_SIZES:
        seconds = _time_on_host(device, dtype, size)
        # A product of size n makes n² sums of n products: 2 n³ operations.
        rate = max(rate, 2 * size**3 / seconds)
        # By what was spent and not by what the next size should take: where other programs hold the cores, threads of a
        # small product wait for each other a hundred times as long as it takes, and those of a large one hardly longer.
        if time.perf_counter() - began > _CPU_BUDGET_SECONDS:
            break
    return rate


def _measure_on_gpu(device: torch.device, dtype: torch.dtype) -> float:
    import torch

    with torch.cuda.device(device):
        # (size, size) each
        left, right = _factors(device, dtype, _GPU_SIZE)
        out = torch.mm(left, right)
        began = time.perf_counter()
        while time.perf_counter() - began < _GPU_WARM_UP_SECONDS:  # an idle card takes a while to reach its clock
            torch.mm(left, right, out=out)
            torch.cuda.synchronize()
        marks: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(_GPU_ROUNDS + 1)]  # type: ignore[no-untyped-call]
        marks[0].record()
        for mark in marks[1:]:
            torch.mm(left, right, out=out)
            mark.record()
        # Events are read by the GPU itself: waiting once at the end leaves no gap between the products.
        marks[-1].synchronize()
    seconds = statistics.median(before.elapsed_time(after) / 1000 for before, after in pairwise(marks))
    return float(2 * _GPU_SIZE**3 / seconds)


def _time_on_host(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Return the seconds of a product, the fastest of some: other programs share the processor.

    Small products are made for longer than another program usually holds a core.
    """
    import torch

    left, right = _factors(device, dtype, size)
    times: list[float] = []
    while len(times) <= _CPU_ROUNDS or sum(times) < _CPU_SIZE_SECONDS:
        began = time.perf_counter()
        product = torch.mm(left, right)
        if device.type != "cpu":
            product[0, 0].item()  # waits for the device
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _factors(device: torch.device, dtype: torch.dtype, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw two random matrices, leaving the run's own random state as it is."""
    import torch

    generator = torch.Generator(device=device).manual_seed(0)
    left, right = (
        # Drawn in float32, since not every dtype has a generator on every device.
        torch.empty(size, size, device=device, dtype=torch.float32).normal_(generator=generator).to(dtype)
        for _ in range(2)
    )
    return left, right


def _product_dtype(device: str, compute_dtype: str) -> str:
    """Name the format that products are really made in: float32 is TF32 where that is switched on and there."""
    if compute_dtype != "float32" or device != "cuda":
        return compute_dtype
    import torch

    backends: Any = torch.backends
    has_units = torch.cuda.get_device_capability() >= (8, 0)
    return "tf32" if has_units and backends.cuda.matmul.fp32_precision == "tf32" else "float32"
