"""Train the same random-weight models on the same lengths with this product and with others, side by side on one GPU.

    python benchmarks/throughput.py [--works 4b-lora 1.7b-full 0.6b-full 4b-qlora] [--frameworks ours trainer trl slow]

Every run is a process of its own and prints one JSON line: real (non-padding) tokens per second over steady steps,
padding share, peak memory, share of the card's peak, first and last loss. At the end comes a table with ratios.

* ``ours`` goes through ``run_training``, the code that ``kedro run --pipelines=train`` runs: packing, attention, loss,
  compiling and all checks as they are by default.
* ``trainer`` is the plain Hugging Face Trainer: bfloat16, SDPA, padded to the longest row of a batch.
* ``trl`` is TRL's SFTTrainer with Liger kernels; ``unsloth`` is the same trainer with Unsloth's model and kernels, as
  Unsloth sets them up. They are left out, with a word, where they are not installed.
* ``slow`` is the setting of a report that this project grew out of: float32 without TF32, eager attention, padded to
  320 tokens, no loader workers, gradient checkpointing, 16 rows per step.

Weights are random, so losses only tell that the arithmetic is right: they start near log(vocabulary) and half the
variance of the head's logits. Lengths: ``report`` (mean 211 tokens, at most 287), or those of a real corpus, as counted
by the tokenizer of SmolLM2 (``benchmarks/lengths/*.json``, counts of rows by length).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

STARTED = time.time()
PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT), str(PROJECT / "src")]

# hidden, layers, heads, key heads, head, feed-forward, vocabulary
SHAPES = {
    "tiny": (64, 2, 4, 2, 16, 128, 512),
    "0.6b": (1024, 28, 16, 8, 128, 3072, 151936),
    "1.7b": (2048, 28, 16, 8, 128, 6144, 151936),
    "4b": (2560, 36, 32, 8, 128, 9728, 151936),
}
WORKS = {
    "4b-lora": {"shape": "4b", "method": "lora", "budget": 12288, "batch": 32},
    "4b-qlora": {"shape": "4b", "method": "qlora", "budget": 12288, "batch": 32},
    "1.7b-full": {"shape": "1.7b", "method": "full", "budget": 16384, "batch": 64},
    "0.6b-lora": {"shape": "0.6b", "method": "lora", "budget": 16384, "batch": 64},
    "0.6b-full": {"shape": "0.6b", "method": "full", "budget": 16384, "batch": 64},
    "tiny-lora": {"shape": "tiny", "method": "lora", "budget": 1024, "batch": 4},
    "tiny-qlora": {"shape": "tiny", "method": "qlora", "budget": 1024, "batch": 4},
    "tiny-full": {"shape": "tiny", "method": "full", "budget": 1024, "batch": 4},
}
FRAMEWORKS = ("ours", "trainer", "trl", "unsloth", "slow")
BF16_PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
say = sys.stdout.write


def draw_lengths(kind: str, count: int) -> np.ndarray:
    """Draw row lengths in tokens, the same for every framework."""
    random = np.random.default_rng(0)
    if kind == "report":
        return np.clip(random.normal(211.5, 40, count), 30, 287).astype(int)
    counts = json.loads((PROJECT / "benchmarks" / "lengths" / f"{kind}.json").read_text())["rows_by_tokens"]
    lengths = np.array([int(length) for length in counts])
    rows = np.array(list(counts.values()), dtype=float)
    return random.choice(lengths, count, p=rows / rows.sum())


def draw_rows(kind: str, count: int, vocabulary: int) -> list[np.ndarray]:
    """Draw rows of random tokens."""
    random = np.random.default_rng(1)
    return [random.integers(8, min(vocabulary, 49000), length) for length in draw_lengths(kind, count)]


def make_config(shape: str) -> Any:
    """Return the configuration of a Qwen3 of that shape."""
    from transformers import Qwen3Config

    hidden, layers, heads, key_heads, head, wide, vocabulary = SHAPES[shape]
    return Qwen3Config(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=key_heads,
        head_dim=head, intermediate_size=wide, vocab_size=vocabulary, tie_word_embeddings=True,
        max_position_embeddings=40960, pad_token_id=0, eos_token_id=7, bos_token_id=7, rope_theta=1e6,
    )  # fmt: skip


def make_model(shape: str, dtype: str, attention: str) -> Any:
    """Build a random model on the device."""
    import torch
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    with torch.device(device()):
        model = Qwen3ForCausalLM._from_config(make_config(shape), attn_implementation=attention)
    torch.set_default_dtype(torch.float32)
    model.config.use_cache = False
    return model


def device() -> str:
    """Return ``cuda`` where there is a card."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def count_matrix_parameters(shape: str) -> int:
    """Count the numbers that every token is multiplied with."""
    hidden, layers, heads, key_heads, head, wide, vocabulary = SHAPES[shape]
    attention = hidden * heads * head * 2 + 2 * hidden * key_heads * head
    return layers * (attention + 3 * hidden * wide) + vocabulary * hidden


# ---------------------------------------------------------------------------------------------------------------- ours


def run_ours(work: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Train through ``run_training``."""
    import logging

    import torch
    from torch._dynamo.utils import counters

    from lm_tuning.models.record import BaseModelRecord
    from lm_tuning.parameters import TrainParameters
    from lm_tuning.runtime.backend import apply_backend
    from lm_tuning.runtime.device import describe_device
    from lm_tuning.runtime.precision import choose_precision
    from lm_tuning.text.store.table import TokenTableWriter
    from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training
    from tests.support.tiny import make_tokenizer

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    apply_backend(tf32=True, flash_sdp=True, mem_efficient_sdp=True, reproducibility="fast", num_threads="auto")
    card = describe_device()
    shape, method, budget = work["shape"], work["method"], options.budget or work["budget"]
    mean = float(draw_lengths(options.lengths, 4000).mean())
    rows_per_step = max(int(0.95 * options.micro_batches * budget / mean), 1)
    imports_seconds = time.time() - STARTED
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = make_model(shape, "bfloat16" if device() == "cuda" else "float32", "sdpa")
        model.save_pretrained(folder / "model")
        del model
        if device() == "cuda":
            torch.cuda.empty_cache()
        make_tokenizer().save_pretrained(folder / "model")
        (folder / "tokens").mkdir()
        for split, count in (("train", rows_per_step * options.steps), ("validation", 0)):
            with TokenTableWriter(folder / "tokens" / f"{split}.arrow") as writer:
                for row, ids in enumerate(draw_rows(options.lengths, count, SHAPES[shape][-1])):
                    writer.append(row + 1, ids, [(0, len(ids))])
        precision = choose_precision(card, method=method)
        settings = TrainingSettings(
            train=TrainParameters(
                method=method,
                learning_rate=1e-4,
                effective_batch_rows=rows_per_step,
                max_steps=options.steps,
                micro_batch_tokens="auto" if options.plan else budget,
                gradient_checkpointing="auto" if options.plan else False,
                batching=options.batching,
                compile={"auto": "auto", "yes": True, "no": False}[options.compile],
                trainer={"lr_scheduler_type": "constant"},
            ),
            base=BaseModelRecord(
                name_or_path=str(folder / "model"),
                revision=None,
                trust_remote_code=False,
                digest=f"random {shape}",
                tokenizer_digest="random",
                is_embedded=False,
            ),
            tokens_key="random",
            weights_dtype=precision.weights,
            compute_dtype=precision.compute,
            device=card.kind,
            seed=0,
        )
        if device() == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.time()
        result = run_training(TrainingPaths(folder / "tokens", folder / "runs", options.plans), settings)
        seconds = time.time() - began
        if options.profile:
            profile_ours(TrainingPaths(folder / "tokens", folder / "runs", options.plans), settings, options)
    rows = result.efficiency[options.skip :]
    used = sum(row["seconds"] for row in rows)
    facts = result.health["facts"]
    return {
        "tokens_per_second": sum(row["num_tokens"] for row in rows) / used,
        "padding": float(np.mean([row["padding_fraction"] for row in rows])),
        "memory_gb": max(row["peak_memory_bytes"] for row in rows) / 2**30,
        "losses": [round(row["loss_nats_per_token"], 4) for row in result.steps],
        "micro_batches": rows[0]["num_micro_batches"],
        "budget": result.batch_plan.micro_batch_tokens,
        "compile_seconds": facts.get("compile_seconds"),
        "fast_path": facts["fast_path"],
        "compile_failure": facts.get("compile_failure"),
        "loader_wait": result.summary["loader_wait_fraction"],
        "health_seconds": result.summary["health_seconds"],
        "whole_run_seconds": seconds,
        "start_seconds": seconds - sum(row["seconds"] for row in result.efficiency),
        "plan": {
            "reason": result.batch_plan.reason,
            "seconds": result.batch_plan.seconds,
            "cached": result.batch_plan.cached,
            "checkpointing": result.batch_plan.gradient_checkpointing,
            "curve": result.batch_plan.to_json()["curve"],
        },
        "imports_seconds": imports_seconds,
        "first_step_ends_seconds": imports_seconds + seconds - sum(row["seconds"] for row in result.efficiency[1:]),
        "graphs": counters["stats"]["unique_graphs"],
        "graphs_kept_from_before": counters["aot_autograd"]["autograd_cache_hit"],
        "findings": [finding["code"] for finding in result.health["findings"]],
    }


def profile_ours(paths: Any, settings: Any, options: argparse.Namespace) -> None:
    """Profile a few steps and write the table and the trace."""
    from lm_tuning.reporting.markdown import write_markdown
    from lm_tuning.training.profile.profiling import compose_report, profile_training

    profile = profile_training(paths, settings, folder=options.profile, num_steps=2)
    (options.profile / "profile.md").write_text(write_markdown(compose_report(profile, {"work": options.works[0]})))


# -------------------------------------------------------------------------------------------------------------- others


class Clock:
    """Note when steps end and what they held."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.batches: list[int] = []
        self.tokens: list[int] = []
        self.positions: list[int] = []

    def see(self, batch: Any) -> None:
        """Count a batch."""
        mask = batch.get("attention_mask")
        ids = batch["input_ids"]
        self.tokens.append(int(mask.sum()) if mask is not None else int((ids != 0).sum()))
        self.positions.append(ids.numel())

    def callback(self) -> Any:
        """Return what notes the end of a step, once the device has finished it."""
        import torch
        from transformers import TrainerCallback

        clock = self

        class Ends(TrainerCallback):
            def on_step_end(self, *given: Any, **more: Any) -> None:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                clock.ends.append(time.perf_counter())
                clock.batches.append(len(clock.tokens))

        return Ends()

    def tokens_per_second(self, skip: int) -> float:
        """Return real tokens per second of the steps after the first ``skip``, however many batches a step has."""
        return sum(self.tokens[self.batches[skip - 1] : self.batches[-1]]) / (self.ends[-1] - self.ends[skip - 1])


def add_lora(model: Any) -> Any:
    """Write the same adapter on a model as ours; TRL was a tenth slower with one that it adds itself."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model, LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    )


def load_for_other(framework: str, shape: str, method: str) -> Any:
    """Return the model that a framework trains, with its adapter."""
    if framework == "unsloth":
        return load_with_unsloth(shape, method)
    slow = framework == "slow"
    dtype = "float32" if slow or method == "full" or device() == "cpu" else "bfloat16"
    model = make_model(shape, dtype, "eager" if slow else "sdpa")
    model = model if method == "full" else add_lora(model)
    if slow:
        model.enable_input_require_grads()
    return model


def load_with_unsloth(shape: str, method: str) -> Any:
    """Let Unsloth load the same random model from a folder and put its adapter on, as its guide says."""
    import torch
    from unsloth import FastLanguageModel

    from tests.support.tiny import make_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        make_model(shape, "bfloat16", "sdpa").save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        torch.cuda.empty_cache()
        model, _ = FastLanguageModel.from_pretrained(
            folder, max_seq_length=2048, dtype=torch.bfloat16, load_in_4bit=False, full_finetuning=method == "full",
            local_files_only=True,
        )  # fmt: skip
    if method == "full":
        return model
    return FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=32, lora_dropout=0.0, bias="none", use_gradient_checkpointing=False,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    )  # fmt: skip


def run_other(framework: str, work: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Train with a Trainer that is not ours."""
    import torch
    from transformers import Trainer, TrainingArguments

    shape, method = work["shape"], work["method"]
    slow, cuda = framework == "slow", device() == "cuda"
    batch = options.batch or (16 if slow or framework == "trainer" else work["batch"])
    steps = min(options.skip + 3, options.steps) if slow else options.steps
    rows = draw_rows(options.lengths, batch * (steps + 2), SHAPES[shape][-1])
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not slow
    model = load_for_other(framework, shape, method)
    workers = 0 if slow else 4
    settings: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": batch, "max_steps": steps, "logging_steps": 1,
        "gradient_accumulation_steps": 1,
        "save_strategy": "no", "report_to": "none", "learning_rate": 1e-4, "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused", "dataloader_num_workers": workers, "dataloader_pin_memory": cuda and not slow,
        "bf16": cuda and not slow, "gradient_checkpointing": slow, "disable_tqdm": True, "use_cpu": not cuda,
        "remove_unused_columns": False,
    }  # fmt: skip
    if workers:
        settings |= {"dataloader_persistent_workers": True, "dataloader_prefetch_factor": 2}
    clock = Clock()

    def collate(items: list[np.ndarray]) -> dict[str, Any]:
        width = 320 if slow else max(map(len, items))
        ids = torch.zeros(len(items), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for position, item in enumerate(items):
            ids[position, : len(item)], mask[position, : len(item)] = torch.from_numpy(item), 1
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    if framework in {"trainer", "slow"}:

        class Counting(Trainer):
            def training_step(self, model: Any, inputs: Any, *given: Any, **more: Any) -> Any:
                clock.see(inputs)
                return super().training_step(model, inputs, *given, **more)

        trainer: Any = Counting(
            model=model, args=TrainingArguments(**settings), train_dataset=rows, data_collator=collate,
            callbacks=[clock.callback()],
        )  # fmt: skip
    else:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        from tests.support.tiny import make_tokenizer

        data = Dataset.from_dict({"input_ids": [row.tolist() for row in rows]})
        settings.pop("remove_unused_columns")
        arguments = SFTConfig(**settings, max_length=2048, use_liger_kernel=framework == "trl" and cuda)
        trainer = SFTTrainer(
            model=model, args=arguments, train_dataset=data, processing_class=make_tokenizer(),
            callbacks=[clock.callback()],
        )  # fmt: skip
        plain = trainer.training_step

        def step(model: Any, inputs: Any, *given: Any, **more: Any) -> Any:
            clock.see(inputs)
            return plain(model, inputs, *given, **more)

        trainer.training_step = step
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    began = time.time()
    trainer.train()
    seconds = time.time() - began
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "tokens_per_second": clock.tokens_per_second(options.skip),
        "padding": 1 - sum(clock.tokens) / sum(clock.positions),
        "memory_gb": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "losses": [round(loss, 4) for loss in losses],
        "batch": batch,
        "whole_run_seconds": seconds,
    }


def run_child(options: argparse.Namespace) -> None:
    """Run one framework on one work and print its figures."""
    if options.frameworks == ["unsloth"]:
        import unsloth  # noqa: F401 - it changes other packages, and must come before them
    import torch
    import transformers

    work = WORKS[options.works[0]]
    [framework] = options.frameworks
    figures = run_ours(work, options) if framework == "ours" else run_other(framework, work, options)
    flops = (6 if work["method"] == "full" else 4) * count_matrix_parameters(work["shape"])
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    peak = next((rate for card, rate in BF16_PEAK.items() if card in name), None)
    speed = figures["tokens_per_second"]
    figures |= {
        "work": options.works[0], "framework": framework, "lengths": options.lengths, "card": name,
        "torch": torch.__version__, "transformers": transformers.__version__,
        "tflops": flops * speed / 1e12, "mfu": flops * speed / peak if peak else None,
    }  # fmt: skip
    say("RESULT " + json.dumps(figures) + "\n")


def is_missing(framework: str) -> bool:
    """Return whether a framework's package is not installed."""
    return framework in {"trl", "unsloth"} and importlib.util.find_spec(framework) is None


def read_options() -> argparse.Namespace:
    """Read what is to be run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=["4b-lora", "1.7b-full", "0.6b-full", "4b-qlora"])
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument("--lengths", default="report", help="report, gsm8k or mts_dialog")
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps of a run")
    parser.add_argument("--skip", type=int, default=6, help="first steps that are not counted")
    parser.add_argument("--micro-batches", type=int, default=2, help="micro-batches of a step of ours")
    parser.add_argument("--budget", type=int, help="tokens of a micro-batch of ours")
    parser.add_argument("--batching", choices=("auto", "packed", "padded"), default="auto", help="of ours")
    parser.add_argument("--plan", action="store_true", help="let the planner choose the tokens of a micro-batch")
    parser.add_argument("--profile", type=Path, help="folder for a profile of some steps of ours after the run")
    parser.add_argument("--plans", type=Path, help="folder where plans are kept for the next call")
    parser.add_argument("--batch", type=int, help="rows of a batch of the others")
    parser.add_argument("--compile", choices=("auto", "yes", "no"), default="yes")
    parser.add_argument("--timeout", type=int, default=240, help="seconds after which a run is given up")
    parser.add_argument("--deadline", type=int, default=3600, help="seconds after which no run is started")
    parser.add_argument("--no-warm-up", action="store_true", help="leave out the tiny run that a fresh machine needs")
    parser.add_argument("--out", type=Path, help="file that the JSON lines are added to")
    parser.add_argument("--chart", type=Path, help="draw all runs of the file --out, or of this command, as a PNG")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run all combinations and print the table."""
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
    names = ("lengths", "steps", "skip", "micro_batches", "budget", "batching", "plans", "profile", "batch", "compile")
    given = {name.replace("_", "-"): getattr(options, name) for name in names}
    passed = [f"--{name}={value}" for name, value in given.items() if value is not None]
    passed += ["--plan"] if options.plan else []
    for work in options.works:
        for framework in options.frameworks:
            if is_missing(framework):
                say(f"{work} {framework}: left out, {framework} is not installed\n")
                continue
            if WORKS[work]["method"] == "qlora" and framework != "ours":
                continue  # its measure is our own LoRA
            if time.time() - began > options.deadline:
                say(f"{work} {framework}: left out, the deadline has passed\n")
                continue
            command = [sys.executable, __file__, "--child", "--works", work, "--frameworks", framework, *passed]
            quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "UNSLOTH_DISABLE_STATISTICS": "1"}
            try:
                done = subprocess.run(
                    command,
                    env={**os.environ, **quiet},
                    capture_output=True,
                    text=True,
                    timeout=options.timeout,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                said = (error.stderr or b"").decode(errors="replace").splitlines()[-12:]
                say(f"{work} {framework}: given up after {options.timeout} s\n" + "\n".join(said) + "\n")
                continue
            lines = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if not lines:
                say(f"{work} {framework}: failed\n" + "\n".join(done.stderr.splitlines()[-12:]) + "\n")
                continue
            found.append(json.loads(lines[0]))
            say(lines[0] + "\n")
            sys.stdout.flush()
            if options.out:
                with options.out.open("a") as file:
                    file.write(lines[0] + "\n")
    print_table(found)
    if options.chart:
        if options.out:
            found = [json.loads(line) for line in options.out.read_text().splitlines()]
        draw_chart(found, options.chart)


def draw_chart(found: list[dict[str, Any]], path: Path) -> None:
    """Draw tokens per second of every framework, a group of bars per work."""
    from matplotlib.figure import Figure

    works = list(dict.fromkeys(entry["work"] for entry in found))
    frameworks = [name for name in FRAMEWORKS if any(entry["framework"] == name for entry in found)]
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(len(frameworks), 1)
    for position, framework in enumerate(frameworks):
        speeds = [
            max((e["tokens_per_second"] for e in found if (e["work"], e["framework"]) == (work, framework)), default=0)
            for work in works
        ]
        bars = axes.bar([index + position * width for index in range(len(works))], speeds, width, label=framework)
        axes.bar_label(bars, labels=[f"{speed:,.0f}" if speed else "" for speed in speeds], fontsize="x-small")
    axes.set_xticks([index + (len(frameworks) - 1) * width / 2 for index in range(len(works))], works)
    axes.set_ylabel("real tokens per second")
    axes.set_title(", ".join(sorted({f"{entry['card']}, torch {entry['torch']}" for entry in found})), fontsize="small")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def print_table(found: list[dict[str, Any]]) -> None:
    """Print every run beside ours."""
    ours = {entry["work"]: entry["tokens_per_second"] for entry in found if entry["framework"] == "ours"}
    heads = (
        "work", "framework", "a micro-batch", "tokens/s", "ours is", "padding", "memory GB", "TFLOP/s", "MFU", "losses",
    )  # fmt: skip
    say(f"| {' | '.join(heads)} |\n" + "|---" * len(heads) + "|\n")
    for entry in found:
        ratio = ours.get(entry["work"], float("nan")) / entry["tokens_per_second"]
        memory = "" if entry["memory_gb"] is None else f"{entry['memory_gb']:.1f}"
        mfu = "" if entry["mfu"] is None else f"{entry['mfu']:.1%}"
        size = f"{entry['budget']:,} tokens" if "budget" in entry else f"{entry['batch']} rows"
        losses = f"{entry['losses'][0]:.4f} -> {entry['losses'][-1]:.4f}"
        say(
            f"| {entry['work']} | {entry['framework']} | {size} | {entry['tokens_per_second']:,.0f} | {ratio:.2f} x | "
            f"{entry['padding']:.1%} | {memory} | {entry['tflops']:,.1f} | {mfu} | {losses} |\n"
        )


if __name__ == "__main__":
    main()
