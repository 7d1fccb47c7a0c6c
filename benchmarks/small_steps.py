"""Time steps of a few short rows: this product with and without CUDA graphs, beside a plain loop with and without.

    python benchmarks/small_steps.py [--methods lora full] [--steps 60] [--rows 32] [--profile-host]

A step is launch-bound where its kernels take less time than the host needs to launch them. The work is a classifier of
77 classes on a Llama of 135M random weights, 32 rows of about 14 tokens per step; without a card a tiny one, which only
tells that the program works. All sides run in this process, one after another, on the same rows:

* ``ours, no graph`` and ``ours, graph``: ``run_training`` with ``train.cuda_graphs`` false and true, everything else as
  it is by default (packing, checks, loader workers, clipping, logging).
* ``plain, no graph`` and ``plain, graph``: model, peft, clipping and fused AdamW in a loop, rows padded to 32
  positions; with a graph, the whole step with the optimizer is recorded.

Printed are the median milliseconds of a step after the first ten, real tokens per second, kernel time of a step by the
profiler, and the largest relative difference of our losses with a graph from those without.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import logging
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT), str(PROJECT / "src")]

NUM_CLASSES = 77
WARM_STEPS = 10
PROFILED_STEPS = 5
PAD = 2
LORA: dict[str, Any] = {"r": 16, "alpha": 32, "target_modules": "all-linear"}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
say = sys.stdout.write


def make_config(tiny: bool, num_layers: int) -> Any:
    """Return the configuration of the 135M model, or of one with hardly any weights."""
    from transformers import LlamaConfig

    sizes: dict[str, Any] = (
        {"hidden_size": 18, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 24}
        if tiny
        else {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
    )
    return LlamaConfig(
        **sizes, num_hidden_layers=num_layers, vocab_size=500 if tiny else 49152, tie_word_embeddings=True,
        max_position_embeddings=8192, pad_token_id=PAD, eos_token_id=0, bos_token_id=1, num_labels=NUM_CLASSES,
    )  # fmt: skip


def draw_steps(options: argparse.Namespace, vocabulary: int) -> list[list[tuple[np.ndarray, int]]]:
    """Draw the rows of each step: token ids and class."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.normal(14, 4, (options.steps, options.rows)), 5, 32).astype(int)
    return [
        [(random.integers(5, vocabulary - 1, length), int(random.integers(NUM_CLASSES))) for length in step]
        for step in lengths
    ]


class KernelTime:
    """Count the time of kernels in a few steps."""

    def __init__(self) -> None:
        self._profiler: Any = None
        self.milliseconds: float | None = None
        self.num_kernels = 0

    def begin(self) -> None:
        """Begin to record, where there is a device."""
        if DEVICE == "cuda":
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profiler.__enter__()

    def end(self) -> None:
        """End, and add up."""
        if self._profiler is None:
            return
        torch.cuda.synchronize()
        self._profiler.__exit__(None, None, None)
        kernels = [event for event in self._profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        self.milliseconds = sum(event.self_device_time_total for event in kernels) / 1000 / PROFILED_STEPS
        self.num_kernels = len(kernels) // PROFILED_STEPS
        self._profiler = None


@contextmanager
def profiled_host(name: str, wanted: bool) -> Iterator[None]:
    """Print the functions that the host spends its time in."""
    if not wanted:
        yield
        return
    profile = cProfile.Profile()
    with profile:
        yield
    say(f"\nHost time of {name}:\n")
    pstats.Stats(profile, stream=sys.stdout).sort_stats("cumulative").print_stats(120)


def run_ours(folder: Path, method: str, graphs: bool, options: argparse.Namespace, vocabulary: int) -> dict[str, Any]:
    """Train through ``run_training``."""
    from random_base import random_base

    from lm_tuning.parameters import TrainParameters
    from lm_tuning.runtime.device import describe_device
    from lm_tuning.runtime.precision import choose_precision
    from lm_tuning.text.store.table import TokenTableWriter
    from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training

    tokens = folder / "tokens"
    if not tokens.exists():
        tokens.mkdir()
        rows = [row for step in draw_steps(options, vocabulary) for row in step]
        for split, kept in (("train", rows), ("validation", [])):
            with TokenTableWriter(tokens / f"{split}.arrow") as writer:
                for index, (ids, label) in enumerate(kept):
                    writer.append(index + 1, ids, [], label=label)
    card = describe_device()
    precision = choose_precision(card, method=method)
    settings = TrainingSettings(
        train=TrainParameters(
            method=method,
            lora=LORA,
            learning_rate=1e-4,
            effective_batch_rows=options.rows,
            max_steps=options.steps,
            micro_batch_tokens=4096,
            gradient_checkpointing=False,
            compile=False,
            cuda_graphs=graphs,
            trainer={"lr_scheduler_type": "constant"},
        ),
        base=random_base(folder / "model"),
        tokens_key="random",
        weights_dtype=precision.weights,
        compute_dtype=precision.compute,
        device=card.kind,
        seed=0,
        task="sequence_classification",
        label_map={f"class {index}": index for index in range(NUM_CLASSES)},
    )
    kernels = KernelTime()

    def on_progress(what: str, step: int, total: int, unit: str) -> None:
        if what == "Training" and step == total - PROFILED_STEPS - 1:
            kernels.begin()
        elif what == "Training" and step == total - 1:
            kernels.end()

    name = f"{method}, ours, {'graph' if graphs else 'no graph'}"
    with profiled_host(name, options.profile_host):
        result = run_training(TrainingPaths(tokens, folder / "runs"), settings, on_progress=on_progress)
    rows = result.efficiency[WARM_STEPS : -PROFILED_STEPS - 1]
    milliseconds = 1000 * statistics.median(row["seconds"] for row in rows)
    facts: Any = result.health["facts"]
    return {
        "name": name,
        "ms_per_step": round(milliseconds, 2),
        "tokens_per_second": round(1000 * statistics.mean(row["num_tokens"] for row in rows) / milliseconds),
        "kernel_ms": kernels.milliseconds and round(kernels.milliseconds, 2),
        "kernels": kernels.num_kernels,
        "forward_ms": round(1000 * statistics.median(row["forward_seconds"] for row in rows), 2),
        "backward_ms": round(1000 * statistics.median(row["backward_seconds"] or 0.0 for row in rows), 2),
        "optimizer_ms": round(1000 * statistics.median(row["optimizer_seconds"] for row in rows), 2),
        "wait_ms": round(1000 * statistics.median(row["loader_wait_seconds"] for row in rows), 2),
        "said": facts["fast_path"]["cuda_graphs"],
        "batching": facts["fast_path"]["batching"],
        "losses": [next(value for key, value in row.items() if key.startswith("loss_")) for row in result.steps],
    }


def run_plain(folder: Path, method: str, graph: bool, options: argparse.Namespace, vocabulary: int) -> dict[str, Any]:
    """Train in a loop without any Trainer, rows padded to 32 positions."""
    from transformers import LlamaForSequenceClassification

    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    model: Any = LlamaForSequenceClassification.from_pretrained(folder / "model", dtype=dtype).to(DEVICE)
    if method == "lora":
        from peft import LoraConfig, get_peft_model

        adapter = LoraConfig(r=LORA["r"], lora_alpha=LORA["alpha"], target_modules="all-linear", task_type="SEQ_CLS")
        model = get_peft_model(model, adapter)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=DEVICE == "cuda", capturable=graph)
    batches = []
    for rows in draw_steps(options, vocabulary):
        ids, mask = torch.full((len(rows), 32), PAD), torch.zeros(len(rows), 32, dtype=torch.int64)
        for index, (row, _) in enumerate(rows):
            ids[index, : len(row)], mask[index, : len(row)] = torch.from_numpy(row), 1
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([label for _, label in rows])})
    static = {name: value.to(DEVICE) for name, value in batches[0].items()}

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(**static).loss
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=not graph)
        return loss

    run = record(step) if graph else step
    kernels, seconds = KernelTime(), []
    for index, batch in enumerate(batches):
        if index == len(batches) - PROFILED_STEPS:
            kernels.begin()
        began = time.perf_counter()
        for name, value in batch.items():
            static[name].copy_(value)
        run()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    kernels.end()
    kept = slice(WARM_STEPS, -PROFILED_STEPS)
    milliseconds = 1000 * statistics.median(seconds[kept])
    num_tokens = statistics.mean(int(batch["attention_mask"].sum()) for batch in batches[kept])
    return {
        "name": f"{method}, plain, {'graph' if graph else 'no graph'}",
        "ms_per_step": round(milliseconds, 2),
        "tokens_per_second": round(1000 * num_tokens / milliseconds),
        "kernel_ms": kernels.milliseconds and round(kernels.milliseconds, 2),
        "kernels": kernels.num_kernels,
    }


def record(step: Callable[[], torch.Tensor]) -> Callable[[], object]:
    """Record a whole step, after three to warm up."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay: Callable[[], object] = graph.replay
    return replay


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--methods", nargs="+", default=["lora", "full"] if DEVICE == "cuda" else ["lora"], choices=["lora", "full"]
    )
    parser.add_argument("--steps", type=int, default=60 if DEVICE == "cuda" else 18)
    parser.add_argument("--rows", type=int, default=32 if DEVICE == "cuda" else 4)
    parser.add_argument("--tiny", action="store_true", default=DEVICE == "cpu")
    parser.add_argument("--layers", type=int, help="of the model, otherwise 30 on a card and 3 without")
    parser.add_argument("--only", choices=["ours", "plain"], help="leave the other side out")
    parser.add_argument("--profile-host", action="store_true", help="print where our host time goes; it slows the host")
    parser.add_argument("--verbose", action="store_true", help="show our log")
    return parser.parse_args()


def main() -> None:
    """Run all sides and print a table."""
    from transformers import LlamaForSequenceClassification
    from transformers.utils import logging as transformers_logging

    from lm_tuning.runtime.backend import apply_backend
    from tests.support.tiny import make_tokenizer

    options = read_options()
    assert options.steps > WARM_STEPS + PROFILED_STEPS + 1, "more steps are needed"
    if options.verbose:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    transformers_logging.set_verbosity_error()
    apply_backend(tf32=True, flash_sdp=True, mem_efficient_sdp=True, reproducibility="fast", num_threads="auto")
    config = make_config(options.tiny, options.layers or (3 if options.tiny else 30))
    found = []
    for method in options.methods:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            torch.manual_seed(0)
            LlamaForSequenceClassification(config).save_pretrained(folder / "model")
            make_tokenizer().save_pretrained(folder / "model")
            for side in (run_ours, run_plain):
                if options.only in (None, side.__name__.removeprefix("run_")):
                    for graph in (False, True) if DEVICE == "cuda" or side is run_ours else (False,):
                        found.append(side(folder, method, graph, options, config.vocab_size))
                        losses = found[-1].get("losses", [])
                        line = {key: value for key, value in found[-1].items() if key != "losses"}
                        line["loss_first_last"] = [round(loss, 4) for loss in losses[:: max(len(losses) - 1, 1)]]
                        say(json.dumps(line) + "\n")
                        sys.stdout.flush()
    card = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    say(f"\n{card}, torch {torch.__version__}, {options.rows} rows per step, median of steps after {WARM_STEPS}\n")
    for line in found:
        kernel = "-" if line["kernel_ms"] is None else f"{line['kernel_ms']:.2f}"
        say(
            f"{line['name']:24} {line['ms_per_step']:8.2f} ms/step {line['tokens_per_second']:8,} tokens/s  "
            f"kernels {kernel} ms ({line['kernels']})\n"
        )
    for method in options.methods:
        with_losses = [line["losses"] for line in found if line["name"].startswith(method) and "losses" in line]
        if len(with_losses) == 2:
            apart = max(abs(a - b) / abs(a) for a, b in zip(*with_losses, strict=True))
            say(f"{method}: losses with a graph differ by at most {apart:.1e} (relative) over {options.steps} steps\n")


if __name__ == "__main__":
    main()
