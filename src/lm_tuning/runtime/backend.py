"""Set torch's own switches, and read back what torch says they are.

Hooks do not run in ranks or in processes that they start, so both call `apply_backend`. What an optimizer cannot do on
the device is said before a training.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from lm_tuning.runtime.threads import group_by_reason, read_num_threads


@dataclass(frozen=True)
class Fact:
    """One switch of torch as it stands.

    Attributes:
        name: where it is found in torch.
        value: what torch reports, not what was asked for.
        reason: why it was set so.
    """

    name: str
    value: str
    reason: str


def apply_backend(
    *,
    tf32: bool = True,
    flash_sdp: bool = True,
    mem_efficient_sdp: bool = True,
    reproducibility: str = "fast",
    num_threads: int | Literal["auto"] = "auto",
) -> list[Fact]:
    """Set matrix precision, attention kernels, determinism and thread count of this process.

    Args:
        tf32: multiply float32 matrices in TF32 on graphics cards that can.
        flash_sdp: allow the flash kernel of scaled dot product attention.
        mem_efficient_sdp: allow the memory-efficient kernel, the fast one that takes a mask.
        reproducibility: ``fast`` lets cuDNN time its algorithms and keep the fastest; ``deterministic`` makes torch use
            algorithms that repeat bit by bit, or raise where it has none.
        num_threads: threads of one CPU operation; ``auto`` leaves the choice to OMP_NUM_THREADS, which wins over a
            number as well.
    """
    import torch

    deterministic = reproducibility == "deterministic"
    count, count_reason = _choose_num_threads(num_threads)
    if count is not None and count != torch.get_num_threads():
        torch.set_num_threads(count)
    # Only the new precision switches, and only those of CUDA products and cuDNN convolutions. The old ones (allow_tf32,
    # get_float32_matmul_precision) must not be read or written afterwards in the same process: torch raises when both
    # kinds are used. The switch for all backends at once would also reach products on the CPU.
    precision = "tf32" if tf32 else "ieee"
    backends: Any = torch.backends  # its type information lacks the new switches
    backends.cuda.matmul.fp32_precision = precision
    backends.cudnn.conv.fp32_precision = precision
    backends.cuda.enable_flash_sdp(flash_sdp)
    backends.cuda.enable_mem_efficient_sdp(mem_efficient_sdp)
    # Timing its algorithms, cuDNN may take another one in the next run, with another order of sums.
    backends.cudnn.benchmark = not deterministic
    backends.cudnn.deterministic = deterministic
    # Only where it changes something: the call imports torch's compiler, which takes seconds.
    if deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(deterministic)
    reasons = {
        "num_threads": count_reason,
        "fp32_precision": f"environment.tf32={str(tf32).lower()}",
        "flash_sdp": f"environment.flash_sdp={str(flash_sdp).lower()}",
        "mem_efficient_sdp": f"environment.mem_efficient_sdp={str(mem_efficient_sdp).lower()}",
        "cudnn_sdp": "torch's default, and what it prefers on Hopper cards",
        "math_sdp": "what is left when no faster kernel fits",
    }
    # What torch reports is logged, not what was asked for: a switch that it does not take would go unseen otherwise.
    by_mode = f"environment.reproducibility={reproducibility}"
    return [
        Fact(name, value, reasons.get(name.rsplit(".", 1)[-1].removesuffix("_enabled"), by_mode))
        for name, value in read_backend().items()
    ]


def read_backend() -> dict[str, str]:
    """Ask torch how its switches stand; imports torch."""
    import torch

    backends: Any = torch.backends
    values = {
        "num_threads": torch.get_num_threads(),
        "backends.cuda.matmul.fp32_precision": backends.cuda.matmul.fp32_precision,
        "backends.cudnn.conv.fp32_precision": backends.cudnn.conv.fp32_precision,
        "backends.cuda.flash_sdp_enabled": backends.cuda.flash_sdp_enabled(),
        "backends.cuda.mem_efficient_sdp_enabled": backends.cuda.mem_efficient_sdp_enabled(),
        "backends.cuda.cudnn_sdp_enabled": backends.cuda.cudnn_sdp_enabled(),
        "backends.cuda.math_sdp_enabled": backends.cuda.math_sdp_enabled(),
        "backends.cudnn.benchmark": backends.cudnn.benchmark,
        "backends.cudnn.deterministic": backends.cudnn.deterministic,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }
    return {f"torch.{name}": str(value) for name, value in values.items()}


def summarize_facts(facts: list[Fact]) -> list[str]:
    """Write facts of the same reason on one line each."""
    return group_by_reason((fact.reason, f"{fact.name}={fact.value}") for fact in facts)


def _choose_num_threads(num_threads: int | Literal["auto"]) -> tuple[int | None, str]:
    """Return the count to set, None to leave torch's own."""
    # Before the parameter: the libraries have read the variable already, and two counts that differ make one of them
    # wait for the other.
    users = read_num_threads(os.environ)
    if users is not None:
        return users, f"OMP_NUM_THREADS={users}"
    if num_threads != "auto":
        return num_threads, f"environment.num_threads={num_threads}"
    return None, "torch's own choice"


def describe_optimizer_limit(name: str | None, *, device: str) -> str | None:
    """Describe what a named optimizer does otherwise than its name says on this device.

    Args:
        name: ``train.trainer.optim``; ``None`` for the Trainer's default.
        device: ``cpu``, ``cuda`` or ``mps``.

    Returns:
        A sentence for a warning, or None.
    """
    # bitsandbytes has the paged optimizers on every device, and without CUDA's unified memory they page nothing.
    if name is not None and name.startswith("paged_") and device != "cuda":
        plain = name.removeprefix("paged_")
        return (
            f"train.trainer.optim = {name} pages its state between the memories of a GPU and of the CPU, and training "
            f"runs on the {device.upper()}: the state is not paged, as with {plain}."
        )
    return None
