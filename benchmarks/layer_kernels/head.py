"""Time the loss of a language model's head with other chunk sizes, accumulations and kernels.

    python benchmarks/layer_kernels/head.py --shapes 4b 1.7b 0.6b

The 4B head is frozen, those of the smaller ones are trained, as in the works of ``throughput.py``. Each line has the
milliseconds of 16,384 positions, those of each part, and errors of loss and gradients against float32.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(PROJECT / "benchmarks"), str(PROJECT / "src"), str(PROJECT)]

import throughput_works as throughput  # noqa: E402
import torch  # noqa: E402

from lm_tuning.batching.losses import chunk_positions, compiled_kernel, plain_kernel  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BEGAN = time.perf_counter()

KERNELS = {"plain": plain_kernel, "compiled": compiled_kernel}
if importlib.util.find_spec("triton") is not None:
    from lm_tuning.batching.row_kernel import row_kernel

    KERNELS["triton"] = row_kernel


class Parts:
    """Milliseconds of each part, by events on the device."""

    def __init__(self, on: bool) -> None:
        """Measure nothing where there is no card."""
        self.marks: list[tuple[str, Any]] = []
        self.on = on and DEVICE == "cuda"

    def mark(self, name: str) -> None:
        """Note the end of a part."""
        if self.on:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((name, event))

    def text(self) -> str:
        """Return the sums."""
        sums: dict[str, float] = {}
        for (_, before), (name, after) in zip(self.marks, self.marks[1:], strict=False):
            sums[name] = sums.get(name, 0.0) + before.elapsed_time(after)
        return ", ".join(f"{name} {took:.1f}" for name, took in sums.items())


def sum_nats(  # noqa: PLR0917
    hidden: Any, weight: Any, targets: Any, size: int, kernel: Any, accumulate: str, parts: Parts
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return loss and gradients, as the product's function makes them."""
    parts.mark("start")
    matrix = weight.to(torch.bfloat16)
    nats = torch.zeros((), device=hidden.device)
    of_hidden = torch.empty_like(hidden)
    of_weight = None
    if accumulate != "frozen":
        of_weight = torch.zeros(weight.shape, device=hidden.device, dtype=torch.float32)
    parts.mark("begin")
    for start in range(0, len(hidden), size):
        rows = hidden[start : start + size].to(torch.bfloat16)
        logits = rows @ matrix.t()
        parts.mark("logits")
        chunk_nats, gradient = kernel(logits, targets[start : start + size], 0.0)
        nats += chunk_nats
        parts.mark("kernel")
        of_hidden[start : start + size] = gradient @ matrix
        parts.mark("hidden")
        if accumulate == "add":
            of_weight += gradient.t() @ rows
        elif accumulate == "addmm":
            torch.ops.aten.addmm.dtype_out(of_weight, gradient.t(), rows, torch.float32, out=of_weight)
        elif accumulate == "mm32":
            of_weight += torch.mm(gradient.t(), rows, out_dtype=torch.float32)
        parts.mark("weight")
        del logits, gradient
    return nats, of_hidden, of_weight


def exact(hidden: Any, weight: Any, targets: Any) -> tuple[Any, Any, Any]:
    """Return loss and gradients in float32."""
    nats = torch.zeros((), device=hidden.device)
    wide, matrix = hidden.float(), weight.float()
    of_hidden, of_weight = torch.empty_like(wide), torch.zeros_like(matrix)
    for start in range(0, len(hidden), 1024):
        part = slice(start, start + 1024)
        chunk, gradient = plain_kernel(wide[part] @ matrix.t(), targets[part], 0.0)
        nats += chunk
        of_hidden[part] = gradient @ matrix
        of_weight.addmm_(gradient.t(), wide[part])
    return nats, of_hidden, of_weight


def off(found: Any, wanted: Any) -> float:
    """Return a relative error."""
    return float((found.float() - wanted).norm() / wanted.norm())


def run(shape: str, options: argparse.Namespace) -> None:
    """Measure a shape."""
    hidden_size, vocabulary = throughput.SHAPES[shape][0], throughput.SHAPES[shape][-1]
    frozen = shape == "4b"
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    draw: Any = {"device": DEVICE, "generator": generator}
    weight = torch.randn(vocabulary, hidden_size, **draw) * 0.02
    weight = weight.bfloat16() if frozen else weight
    hidden = torch.randn(options.tokens, hidden_size, **draw).to(torch.bfloat16)
    targets = torch.randint(0, vocabulary, (options.tokens,), **draw)
    targets[::50] = -100
    wanted = exact(hidden, weight, targets)
    present = chunk_positions(vocabulary, device=DEVICE, bytes_per_logit=2)
    sizes = [present, *options.sizes]
    plans = [(size, "compiled" if DEVICE == "cuda" else "plain", "frozen" if frozen else "add") for size in sizes]
    for size in [present, *options.sizes]:
        plans += [(size, "triton", "frozen")] if frozen else [(size, "triton", "addmm"), (size, "triton", "mm32")]
    plans += [] if frozen else [(size, "compiled", "addmm") for size in sizes[:3]]
    plans = [plan for plan in plans if plan[1] in KERNELS]
    first = 0.0
    for size, name, accumulate in plans:
        if time.perf_counter() - BEGAN > options.deadline:
            sys.stdout.write("the deadline has passed\n")
            return
        try:
            given = (hidden, weight, targets, size, KERNELS[name], accumulate)
            nats, of_hidden, of_weight = sum_nats(*given, Parts(on=False))
            errors = f"nats {off(nats, wanted[0]):.0e} hidden {off(of_hidden, wanted[1]):.1e}"
            errors += "" if of_weight is None else f" weight {off(of_weight, wanted[2]):.1e}"
            del of_hidden, of_weight
            times = []
            for _ in range(options.turns):
                if DEVICE == "cuda":
                    torch.cuda.synchronize()
                began = time.perf_counter()
                sum_nats(*given, Parts(on=False))
                if DEVICE == "cuda":
                    torch.cuda.synchronize()
                times.append(1000 * (time.perf_counter() - began))
            parts = Parts(on=True)
            sum_nats(*given, parts)
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            took = statistics.median(times)
            first = first or took
            sys.stdout.write(f"{shape} chunk {size} {name} {accumulate}: {took:.1f} ms ({first - took:+.1f}); "
                             f"{parts.text()}; {errors}\n")  # fmt: skip
        # Whatever a kernel raises, the next one is tried.
        except Exception as error:
            line = next(iter(str(error).strip().splitlines()), "")
            sys.stdout.write(
                f"{shape} chunk {size} {name} {accumulate}: failed, {type(error).__name__}: {line[:200]}\n"
            )
        sys.stdout.flush()


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["4b", "1.7b", "0.6b"], choices=throughput.SHAPES)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1664, 2048, 3328, 4096, 6656, 8192])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--deadline", type=float, default=90)
    options = parser.parse_args()
    for shape in options.shapes:
        run(shape, options)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
