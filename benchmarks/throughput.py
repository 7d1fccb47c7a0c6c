"""Train the same random-weight models on the same lengths with this product and with others, side by side on one GPU.

    python benchmarks/throughput.py [--works 4b-lora 0.6b-lora-classes] [--frameworks ours trainer trl] [--seconds 60]

Every run is a process of its own and prints one JSON line: real (non-padding) tokens per second over steady steps,
padding share, peak memory, share of the card's peak, first and last loss. At the end come a row per work, ours beside
each peer at its best, and a row per run.

* ``ours`` goes through ``run_training``, the code that ``kedro run --pipelines=train`` runs: packing, attention, loss,
  compiling and all checks as they are by default; the head's loss is chosen as in a run of hours.
* ``trainer`` is the plain Hugging Face Trainer: bfloat16, SDPA, fused AdamW, rows grouped by length and padded to the
  longest of a batch; ``liger`` is the same with Liger's kernels.
* ``trl`` is TRL's SFTTrainer with Liger kernels; ``unsloth`` is the same trainer with Unsloth's model and kernels, as
  Unsloth sets them up.
* ``slow`` is the setting of a report that this project grew out of: float32 without TF32, eager attention, padded to
  320 tokens, no loader workers, gradient checkpointing, 16 rows per step. It runs where it is asked for.

A peer's rows of a batch are doubled until memory runs out, a batch is slower than the one before, or ``--seconds`` have
passed; the fastest counts. What is not installed, or has no trainer for a work, is left out with a word.

Weights are random, so losses only tell that the arithmetic is right: they start near log(vocabulary) and half the
variance of the head's logits, of classes near log(classes). Lengths: ``report`` (mean 211 tokens, at most 287), or
those of a real corpus, as counted by the tokenizer of SmolLM2 (``benchmarks/lengths/*.json``, rows by length).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STARTED = time.time()
PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT), str(PROJECT / "src")]

from throughput_table import draw_chart, write_summary, write_table  # noqa: E402
from throughput_works import WORKS  # noqa: E402

FRAMEWORKS = ("ours", "trainer", "liger", "trl", "unsloth", "slow")
PACKAGES = {"liger": "liger_kernel", "trl": "trl", "unsloth": "unsloth"}
BF16_PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
DEFAULT_WORKS = ("4b-lora", "1.7b-full", "0.6b-full", "4b-qlora")
TINY_WORKS = ("tiny-lora", "tiny-full", "tiny-lora-classes")
say = sys.stdout.write


def run_child(options: argparse.Namespace) -> None:
    """Run one framework on one work and print its figures."""
    if options.frameworks == ["unsloth"]:
        import unsloth  # noqa: F401 - it changes other packages, and must come before them
    import torch
    import transformers

    [name], [framework] = options.works, options.frameworks
    work = WORKS[name]
    if framework == "ours":
        from throughput_ours import run_ours

        figures = run_ours(work, options, started=STARTED)
    else:
        from throughput_peers import run_peer

        figures = run_peer(framework, work, options)
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    peak = next((rate for known, rate in BF16_PEAK.items() if known in card), None)
    flops = work.flops_per_token * figures["tokens_per_second"]
    figures |= {
        "work": name, "framework": framework, "lengths": options.lengths, "card": card,
        "torch": torch.__version__, "transformers": transformers.__version__,
        "tflops": flops / 1e12, "mfu": flops / peak if peak else None,
    }  # fmt: skip
    say("RESULT " + json.dumps(figures) + "\n")


def has_card() -> bool:
    """Return whether there is a GPU, without making one's own use of it."""
    import torch

    return torch.cuda.is_available()


def why_left_out(framework: str, work: str) -> str | None:
    """Return why a framework cannot run a work, ``None`` if it can."""
    package = PACKAGES.get(framework)
    if package is not None and importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    if framework == "trl" and importlib.util.find_spec("liger_kernel") is None:
        return "liger_kernel is not installed"
    if WORKS[work].method == "qlora" and framework != "ours":
        return "its measure is our own LoRA"
    if framework == "liger" and not has_card():
        return "its kernels need a GPU"
    if WORKS[work].num_classes and framework in {"trl", "unsloth"}:
        return "it has no trainer of classes"
    return None


def read_options() -> argparse.Namespace:
    """Read what is to be run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", choices=WORKS, help=f"by default {' '.join(DEFAULT_WORKS)}")
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS[:-1]))
    parser.add_argument("--lengths", default="report", help="report, gsm8k or mts_dialog")
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps of a run; peers take up to 11 a size")
    parser.add_argument("--skip", type=int, default=6, help="first steps that are not counted; peers skip up to 3")
    parser.add_argument("--micro-batches", type=int, default=2, help="micro-batches of a step of ours")
    parser.add_argument("--budget", type=int, help="tokens of a micro-batch of ours")
    parser.add_argument("--batching", choices=("auto", "packed", "padded"), default="auto", help="of ours")
    parser.add_argument("--plan", action="store_true", help="let the planner choose the tokens of a micro-batch")
    parser.add_argument("--profile", type=Path, help="folder for a profile of some steps of ours after the run")
    parser.add_argument("--plans", type=Path, help="folder where plans are kept for the next call")
    parser.add_argument("--batch", type=int, help="rows of a batch of the others, instead of the best")
    parser.add_argument("--seconds", type=float, default=60, help="that a peer may look for its best batch")
    parser.add_argument("--compile", choices=("auto", "yes", "no"), default="yes")
    parser.add_argument("--timeout", type=int, default=240, help="seconds after which a run is given up")
    parser.add_argument("--deadline", type=int, default=3600, help="seconds after which no run is started")
    parser.add_argument("--no-warm-up", action="store_true", help="leave out the tiny run that a fresh machine needs")
    parser.add_argument("--tiny", action="store_true", help="tiny works, a few steps: does everything run?")
    parser.add_argument("--out", type=Path, help="file that the JSON lines are added to")
    parser.add_argument("--chart", type=Path, help="draw all runs of the file --out, or of this command, as a PNG")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        options.steps, options.skip, options.compile, options.no_warm_up = 4, 1, "no", True
        options.seconds = min(options.seconds, 8)
    options.works = options.works or list(TINY_WORKS if options.tiny else DEFAULT_WORKS)
    return options


def main() -> None:
    """Run all combinations and print the tables."""
    options = read_options()
    if options.child:
        run_child(options)
        return
    began = time.time()
    found: list[dict[str, Any]] = []
    if not options.no_warm_up:
        # A fresh machine reads compilers and libraries from its disk for the first time, which took minutes on one.
        tiny = [sys.executable, __file__, "--child", "--works", "tiny-lora", "--frameworks", "ours", "--steps", "3"]
        subprocess.run([*tiny, "--skip", "1"], capture_output=True, timeout=options.timeout, check=False)
        say(f"warmed up in {time.time() - began:.0f} s\n")
    for work in options.works:
        for framework in options.frameworks:
            reason = why_left_out(framework, work)
            if reason is None and time.time() - began > options.deadline:
                reason = "the deadline has passed"
            if reason is not None:
                say(f"{work} {framework}: left out, {reason}\n")
                continue
            figures = run_apart(work, framework, options)
            if figures is None:
                continue
            found.append(figures)
            line = json.dumps(figures) + "\n"
            say(line)
            sys.stdout.flush()
            if options.out:
                with options.out.open("a") as file:
                    file.write(line)
    say(write_summary(found, FRAMEWORKS) + write_table(found))
    if options.chart:
        if options.out:
            found = [json.loads(line) for line in options.out.read_text().splitlines()]
        draw_chart(found, options.chart, FRAMEWORKS)


def run_apart(work: str, framework: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Run one framework on one work in a process of its own; return its figures, or say why there are none."""
    names = ("lengths", "steps", "skip", "micro_batches", "budget", "batching", "plans", "profile", "batch", "seconds")
    given = {name.replace("_", "-"): getattr(options, name) for name in (*names, "compile")}
    passed = [f"--{name}={value}" for name, value in given.items() if value is not None]
    passed += ["--plan"] if options.plan else []
    command = [sys.executable, __file__, "--child", "--works", work, "--frameworks", framework, *passed]
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "UNSLOTH_DISABLE_STATISTICS": "1"}
    try:
        done = subprocess.run(
            command, env={**os.environ, **quiet}, capture_output=True, text=True, timeout=options.timeout, check=False
        )
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"").decode(errors="replace").splitlines()[-12:]
        say(f"{work} {framework}: given up after {options.timeout} s\n" + "\n".join(said) + "\n")
        return None
    lines = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        say(f"{work} {framework}: failed\n" + "\n".join(done.stderr.splitlines()[-12:]) + "\n")
        return None
    figures: dict[str, Any] = json.loads(lines[0])
    return figures


if __name__ == "__main__":
    main()
