"""Train the same 50 steps through every switched path and print how far each step's loss is from the plain path's.

    python benchmarks/loss_curves.py [--shape 135m] [--methods lora full] [--dtypes float32 bfloat16] [--chart out.png]

The plain path is what a Trainer does: padded rows, every operation launched by itself, plain cross-entropy in chunks,
the library's adapters. Each path changes one of these, the last all of them, and goes through ``run_training``. ``plain
again`` repeats the plain path, and ``plain, split otherwise`` splits each step into other micro-batches: what these two
differ by is no path's doing.

Rows are lines of the standard library's source, byte by byte, so that losses fall as on text. Weights are random
and labelled so in the results. In float32 TF32 is off.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT), str(PROJECT / "src")]

from throughput_works import SHAPES, device, make_model  # noqa: E402

say = sys.stdout.write
ROWS_PER_STEP = 16
ROW_BYTES = (40, 400)
# Ids of bytes begin behind those of special tokens.
FIRST_ID = 8


@dataclass(frozen=True)
class Route:
    """A path through the training.

    Attributes:
        name: in the table.
        train: parameters that differ from the plain path's.
        fused_lora: whether adapters run fused.
        long_run: whether the head's loss is chosen as in a run of hours.
        methods: that it makes sense for.
    """

    name: str
    train: dict[str, Any] = field(default_factory=dict)
    fused_lora: bool = False
    long_run: bool = False
    methods: tuple[str, ...] = ("lora", "full")


PLAIN: dict[str, Any] = {"batching": "padded", "compile": False, "cuda_graphs": False}
ROUTES = (
    Route("plain"),
    Route("plain again"),
    Route("plain, split otherwise", {"micro_batch_tokens": 1600}),
    Route("packed", {"batching": "packed"}),
    Route("fused LoRA forward", fused_lora=True, methods=("lora",)),
    Route("head's loss chosen by a try", long_run=True),
    Route("compiled layers", {"compile": True}),
    Route("CUDA graphs", {"batching": "packed", "cuda_graphs": True}),
    Route("gradient checkpointing", {"gradient_checkpointing": True}),
    Route(
        "all", {"batching": "auto", "compile": True, "cuda_graphs": "auto"}, fused_lora=True, long_run=True
    ),
)  # fmt: skip


def read_rows(count: int) -> list[np.ndarray]:
    """Return parts of the standard library's source, byte by byte.

    Args:
        count: rows.
    """
    random = np.random.default_rng(0)
    files = sorted(Path(json.__file__).parents[1].glob("*.py"))
    source = b"\n".join(file.read_bytes() for file in files)
    lengths = random.integers(*ROW_BYTES, count)
    starts = random.integers(0, len(source) - ROW_BYTES[1], count)
    return [
        np.frombuffer(source[start : start + length], np.uint8).astype(np.int64) + FIRST_ID
        for start, length in zip(starts, lengths, strict=True)
    ]


def write_work(folder: Path, shape: str, num_steps: int) -> None:
    """Write a random model and the rows.

    Args:
        folder: for both.
        shape: of the model.
        num_steps: that the rows must last for.
    """
    from lm_tuning.text.store.table import TokenTableWriter
    from tests.support.tiny import make_tokenizer

    make_model(shape, "float32", "sdpa").save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    (folder / "tokens").mkdir()
    with TokenTableWriter(folder / "tokens/train.arrow") as writer:
        for number, ids in enumerate(read_rows(num_steps * ROWS_PER_STEP)):
            writer.append(number + 1, ids, [(0, len(ids))])
    with TokenTableWriter(folder / "tokens/validation.arrow"):
        pass


@contextmanager
def switched(route: Route) -> Iterator[None]:
    """Switch a path's kernels on: the head's loss and the adapters have no parameter."""
    from lm_tuning.training.kernels import fast_path

    choose: Callable[..., Any] = fast_path.choose_head_loss
    # Nobody waits for a faster kernel in a run that has no positions.
    num_positions = math.inf if route.long_run else 0
    with ExitStack() as stack:
        stack.enter_context(
            patch.object(
                fast_path,
                "choose_head_loss",
                lambda *a, **named: choose(*a, **named | {"num_positions": num_positions}),
            )
        )
        if not route.fused_lora:
            stack.enter_context(patch.object(fast_path, "install_fused_lora", lambda *_, **__: 0))
        yield


def train(folder: Path, route: Route, method: str, dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train through a path; return the losses and what the product says that it chose."""
    from random_base import random_base

    from lm_tuning.parameters import TrainParameters
    from lm_tuning.runtime.backend import apply_backend
    from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training

    fast = dtype != "float32"
    apply_backend(tf32=fast, flash_sdp=True, mem_efficient_sdp=True, reproducibility="fast", num_threads="auto")
    given = PLAIN | {"micro_batch_tokens": 8192, "gradient_checkpointing": False} | route.train
    settings = TrainingSettings(
        train=TrainParameters(
            method=method, learning_rate=3e-4 if method == "full" else 2e-3, effective_batch_rows=ROWS_PER_STEP,
            max_steps=options.steps, trainer={"lr_scheduler_type": "constant"}, **given,
        ),
        base=random_base(folder / "model", options.shape), tokens_key="random",
        weights_dtype="float32" if method == "full" else dtype, compute_dtype=dtype, device=device(), seed=0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as runs, switched(route):
        result = run_training(TrainingPaths(folder / "tokens", Path(runs)), settings)
    losses = [next(row[key] for key in row if key.startswith("loss_")) for row in result.steps]
    return {"losses": losses, "chosen": result.health["facts"]["fast_path"]}


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Draw every curve beside the plain one, and below how far it is from it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    works = list(dict.fromkeys((entry["method"], entry["dtype"]) for entry in found))
    figure, axes = pyplot.subplots(2, len(works), figsize=(6 * len(works), 8), squeeze=False, layout="constrained")
    for column, work in enumerate(works):
        for entry in (entry for entry in found if (entry["method"], entry["dtype"]) == work):
            steps = range(1, len(entry["losses"]) + 1)
            axes[0][column].plot(steps, entry["losses"], label=entry["path"], linewidth=1)
            if entry["path"] != "plain":
                axes[1][column].semilogy(steps, np.maximum(entry["relative"], 1e-9), label=entry["path"], linewidth=1)
        axes[0][column].set(title=f"{work[0]}, {work[1]}", xlabel="step", ylabel="nats per token")
        axes[1][column].set(xlabel="step", ylabel="relative difference from plain")
        axes[1][column].axhline(1e-3, color="black", linestyle=":", linewidth=1)
        axes[0][column].legend(fontsize=7)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run all paths and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="135m" if device() == "cuda" else "tiny", choices=SHAPES)
    parser.add_argument("--methods", nargs="+", default=["lora", "full"], choices=("lora", "full"))
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"))
    parser.add_argument("--paths", nargs="+", help="names of paths, beside the plain one")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path, help="file that the JSON lines are added to")
    parser.add_argument("--chart", type=Path, help="PNG of all curves")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    dtypes = options.dtypes or (["float32", "bfloat16"] if device() == "cuda" else ["float32"])
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        write_work(Path(scratch), options.shape, options.steps)
        for dtype in dtypes:
            for method in options.methods:
                found += run_paths(Path(scratch), method, dtype, options)
    say(f"\nrandom weights of {options.shape}, {options.steps} steps of {ROWS_PER_STEP} rows, {device()}\n")
    say("| method | dtype | path | first loss | last loss | largest relative difference of a step | of the mean |\n")
    say("|---|---|---|---:|---:|---:|---:|\n")
    for entry in found:
        losses, of_mean = entry["losses"], entry["relative_of_mean"]
        say(
            f"| {entry['method']} | {entry['dtype']} | {entry['path']} | {losses[0]:.4f} | {losses[-1]:.4f} "
            f"| {max(entry['relative']):.1e} | {of_mean:.1e} |\n"
        )
    if options.chart:
        draw(found, options.chart)


def run_paths(folder: Path, method: str, dtype: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train through every path that a method has; one that fails is said and left out."""
    found: list[dict[str, Any]] = []
    for route in ROUTES:
        if method not in route.methods or (options.paths and route.name not in {"plain", *options.paths}):
            continue
        if device() != "cuda" and route.name in {"compiled layers", "CUDA graphs", "all"}:
            continue
        try:
            entry = train(folder, route, method, dtype, options)
        except Exception as error:
            say(f"{method} {dtype} {route.name}: failed, {type(error).__name__}: {str(error)[:300]}\n")
            continue
        plain = np.array(found[0]["losses"] if found else entry["losses"])
        losses = np.array(entry["losses"])
        entry |= {
            "method": method, "dtype": dtype, "path": route.name, "weights": "random",
            "relative": (abs(losses - plain) / plain).tolist(),
            "relative_of_mean": float(abs(losses.mean() - plain.mean()) / plain.mean()),
        }  # fmt: skip
        found.append(entry)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(entry) + "\n")
    return found


if __name__ == "__main__":
    main()
