"""Train with the products of frozen layers in bfloat16 and in FP8, side by side through ``run_training``.

    python benchmarks/fp8.py --shape 4b [--steps 50] [--tokens 16384] [--profile]
    python benchmarks/fp8.py --model FOLDER --rows train.jsonl --held-out-rows test.jsonl

LoRA on all linear layers, one micro-batch per step, compiled layers. A shape has random weights and random rows of the
lengths that ``throughput.py`` draws, which tells speed and memory; what the rounding does to a loss is told by a real
model (``embedded``: the one that the project comes with) and real rows, JSON lines of ``question`` and ``answer``.

Of each side one JSON line with the losses of all steps, then a table: tokens per second after the first ten steps,
memory, the mean loss of the steps, and the held-out loss before and after, which is measured in bfloat16 on both sides.
Below it the two differences that decide: held-out loss (0.5 % at most) and mean loss (1 % at most).
``--profile`` adds the kernels' time of a step by kind.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "src")]

import torch  # noqa: E402
from random_base import random_base  # noqa: E402
from throughput_works import SHAPES, device, draw_rows, make_model  # noqa: E402

WARM_STEPS = 10
PROFILED_STEPS = 2
HELD_OUT_BOUND, MEAN_BOUND = 0.005, 0.01
SIDES = {"bf16": False, "fp8": True}
say = sys.stdout.write


def write_model(folder: Path, options: argparse.Namespace) -> Path:
    """Write the model that is trained; return its folder."""
    if options.model and options.model != "embedded":
        return Path(options.model)
    if options.model:
        from lm_tuning.models.base_model import convert_embedded_model

        convert_embedded_model(folder)
        return folder
    from tests.support.tiny import make_tokenizer

    model = make_model(options.shape, "bfloat16", "sdpa")
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    del model
    release()
    return folder


def release() -> None:
    """Give memory back."""
    gc.collect()
    if device() == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def read_rows(path: Path, model: Path, count: int) -> Iterator[tuple[list[int], int]]:
    """Yield the tokens of rows, and how many of them are the question's."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    with path.open(encoding="utf-8") as lines:
        for line, _ in zip(lines, range(count), strict=False):
            row = json.loads(line)
            question = tokenizer(row["question"] + "\n").input_ids
            yield [*question, *tokenizer(row["answer"]).input_ids, tokenizer.eos_token_id], len(question)


def write_tokens(folder: Path, model: Path, options: argparse.Namespace) -> float:
    """Write training and held-out rows; return the mean length of a training row in tokens."""
    from lm_tuning.text.store.table import TokenTableWriter

    folder.mkdir()
    num_train = options.steps * options.tokens // 100
    rows: list[tuple[Any, int]]
    if options.rows:
        rows = list(read_rows(options.rows, model, num_train))
        held_out = list(read_rows(options.held_out_rows, model, options.held_out))
    else:
        drawn = [
            (ids, 0) for ids in draw_rows("report", num_train + options.held_out, SHAPES[options.shape].vocabulary)
        ]
        rows, held_out = drawn[:num_train], drawn[num_train:]
    for split, kept in (("train", rows), ("validation", held_out)):
        with TokenTableWriter(folder / f"{split}.arrow") as writer:
            for index, (ids, start) in enumerate(kept):
                writer.append(index + 1, ids, [(start, len(ids))])
    return float(np.mean([len(ids) for ids, _ in rows]))


class Kernels:
    """Counts the time of kernels in a few steps, by kind."""

    def __init__(self) -> None:
        self._profiler: Any = None
        self.milliseconds: dict[str, float] = {}
        self.longest: list[tuple[str, float]] = []

    def begin(self) -> None:
        """Begin to record."""
        if device() == "cuda":
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profiler.__enter__()

    def end(self) -> None:
        """End, and add up."""
        if self._profiler is None:
            return
        torch.cuda.synchronize()
        self._profiler.__exit__(None, None, None)
        kinds: dict[str, float] = defaultdict(float)
        kernels: dict[str, float] = defaultdict(float)
        for event in self._profiler.events():
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("##"):
                took = event.self_device_time_total / 1000 / PROFILED_STEPS
                kinds[kind_of(event.name)] += took
                kernels[event.name] += took
        self.milliseconds = {kind: round(took, 1) for kind, took in sorted(kinds.items(), key=lambda each: -each[1])}
        self.longest = sorted(kernels.items(), key=lambda each: -each[1])[:16]
        self._profiler = None


def kind_of(kernel: str) -> str:
    """Return what a kernel does, by its name."""
    name = kernel.lower()
    if any(part in name for part in ("flash", "fmha", "attention")):
        return "attention"
    if "triton" in name:
        return "triton"
    if any(part in name for part in ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk")):
        # Products in 8 bits have their type in the name: nvjet's second letter is q, cutlass writes it out.
        is_8_bit = any(part in name for part in ("nvjet_sm90_q", "nvjet_qq", "e4m3", "float_e4", "fp8", "f8f8"))
        return "products in 8 bits" if is_8_bit else "products in 16 bits"
    return "other"


def train(name: str, folder: Path, model: Path, mean: float, options: argparse.Namespace) -> dict[str, Any]:
    """Train one side."""
    from lm_tuning.parameters import TrainParameters
    from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training

    settings = TrainingSettings(
        train=TrainParameters(
            method="lora",
            fp8=SIDES[name],
            learning_rate=options.learning_rate,
            effective_batch_rows=max(int(0.95 * options.tokens / mean), 1),
            max_steps=options.steps,
            micro_batch_tokens=options.tokens,
            gradient_checkpointing=options.checkpointing,
            compile=options.compile,
            cuda_graphs=False,
            eval_every_steps=options.steps,
            eval_max_rows=None,
            trainer={"lr_scheduler_type": "constant"},
        ),
        base=random_base(model, options.shape),
        tokens_key="random",
        weights_dtype="bfloat16",
        compute_dtype="bfloat16",
        device=device(),
        seed=0,
    )
    kernels = Kernels()

    def on_progress(what: str, step: int, total: int, unit: str) -> None:
        if options.profile and what == "Training" and step == total - PROFILED_STEPS - 1:
            kernels.begin()
        elif what == "Training" and step == total - 1:
            kernels.end()

    torch._dynamo.reset()
    release()
    result = run_training(TrainingPaths(folder / "tokens", folder / f"runs-{name}"), settings, on_progress=on_progress)
    facts: Any = result.health["facts"]
    rows = result.efficiency[min(WARM_STEPS, len(result.efficiency) // 2) :]
    rows = rows[: -PROFILED_STEPS - 1] if options.profile and len(rows) > PROFILED_STEPS + 1 else rows
    losses = [row["loss_nats_per_token"] for row in result.steps]
    held_out = [row["validation_nats_per_token"] for row in result.evaluations]
    return {
        "side": name,
        "tokens_per_second": round(sum(row["num_tokens"] for row in rows) / sum(row["seconds"] for row in rows)),
        "ms_per_step": round(1000 * statistics.median(row["seconds"] for row in rows), 1),
        "tokens_per_step": round(statistics.mean(row["num_tokens"] for row in rows)),
        "memory_gb": round(max(row["peak_memory_bytes"] for row in rows) / 2**30, 2),
        "compile_seconds": round(facts.get("compile_seconds") or 0.0, 1),
        "mean_loss": statistics.mean(losses),
        "held_out_before": held_out[0],
        "held_out_after": held_out[-1],
        "fp8": facts["fast_path"].get("fp8"),
        "first_step": facts.get("fp8_first_step"),
        "compile_failure": facts.get("compile_failure"),
        "findings": [finding["code"] for finding in result.health["findings"]],
        "kernel_ms": kernels.milliseconds,
        "longest_kernels": [(kernel[:90], round(took, 2)) for kernel, took in kernels.longest],
        "losses": [round(loss, 5) for loss in losses],
    }


def describe(found: dict[str, dict[str, Any]]) -> str:
    """Write the table, and the differences where both sides were measured."""
    columns = ("tokens_per_second", "ms_per_step", "memory_gb", "compile_seconds", "mean_loss", "held_out_before",
               "held_out_after")  # fmt: skip
    lines = ["| side | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, figures in found.items():
        cells = (f"{figures[column]:.5g}" if "loss" in column or "held" in column else str(figures[column])
                 for column in columns)  # fmt: skip
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if len(found) == len(SIDES):
        plain, ours = (found[name] for name in SIDES)
        held_out, mean = (ours[key] / plain[key] - 1 for key in ("held_out_after", "mean_loss"))
        farthest = max(abs(a / b - 1) for a, b in zip(ours["losses"], plain["losses"], strict=True))
        lines += [
            f"FP8 is {ours['tokens_per_second'] / plain['tokens_per_second']:.3f} times as fast; held-out loss "
            f"{held_out:+.3%} ({'within' if abs(held_out) <= HELD_OUT_BOUND else 'BEYOND'} {HELD_OUT_BOUND:.1%}), mean "
            f"loss {mean:+.3%} ({'within' if abs(mean) <= MEAN_BOUND else 'BEYOND'} {MEAN_BOUND:.1%}), a step at most "
            f"{farthest:.3%}.",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="of random weights")
    parser.add_argument("--model", help="a folder of a real model, or embedded")
    parser.add_argument("--rows", type=Path, help="JSON lines to train on")
    parser.add_argument("--held-out-rows", type=Path, help="JSON lines to measure")
    parser.add_argument("--held-out", type=int, default=256, help="rows that are measured")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=16384, help="of a step, which is one micro-batch")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--long-run", action="store_true", help="take the head's loss that a run of hours would take")
    parser.add_argument("--loss-bound", type=float, help="in the place of the product's, to train on beyond it")
    parser.add_argument("--emulate", action="store_true", help="run without a card, which tells nothing of speed")
    options = parser.parse_args()
    if options.model and not (options.rows and options.held_out_rows):
        parser.error("--model needs --rows and --held-out-rows")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    from lm_tuning.runtime.backend import apply_backend
    from lm_tuning.training.kernels import fast_path, fp8, fp8_trial

    if options.emulate:
        fp8.why_no_device = lambda kind: None
    if options.long_run:
        choose = fast_path.choose_head_loss
        fast_path.choose_head_loss = lambda *given, **named: choose(*given, **named | {"num_positions": math.inf})
    if options.loss_bound:
        fp8_trial.LOSS_BOUND = options.loss_bound
    apply_backend(tf32=True, flash_sdp=True, mem_efficient_sdp=True, reproducibility="fast", num_threads="auto")
    card = torch.cuda.get_device_name() if device() == "cuda" else "no card"
    what = options.model or f"random weights of the shape {options.shape}"
    say(f"{what}, {options.steps} steps of {options.tokens} tokens, {card}, torch {torch.__version__}\n")
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = write_model(folder / "model", options)
        mean = write_tokens(folder / "tokens", model, options)
        for name in options.sides:
            found[name] = train(name, folder, model, mean, options)
            say(json.dumps(found[name]) + "\n")
            sys.stdout.flush()
    say(describe(found))


if __name__ == "__main__":
    main()
