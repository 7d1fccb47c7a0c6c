"""Compare ``kedro run --pipelines=train`` with a bare Hugging Face ``Trainer`` on the same rows.

    python benchmarks/trainer_overhead.py [--pairs 5] [--steps 12] [--rows 8]

Both sides train the stored token set of the default output with the same model, adapter, optimizer, precision
(float32) and rows per step, in processes of their own that alternate. The bare script is what one would write by
hand: a list of rows, ``DataCollatorForSeq2Seq``, ``Trainer.train()``. Printed are tokens per second over the
steps after the second one, the ratio of each pair, their median, the losses of both sides, and the seconds from
the start of a process to its first step; of the Kedro side also how many of them the checks before step 1 took.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
OUTPUT = "benchmark_overhead"
WARM_STEPS = 2
LEARNING_RATE = 5e-4
RANK = 16


def bare(steps: int, rows: int) -> None:
    """Train with the plain Trainer in this process and print one JSON line."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainerCallback, TrainingArguments, set_seed

    from lm_tuning.batching.step_plan import StepPlan
    from lm_tuning.models.loading import load_model, load_tokenizer
    from lm_tuning.text.store.table import labels_of, open_split

    base = json.loads((PROJECT / f"data/06_models/{OUTPUT}/base_model.json").read_text())
    pointer = json.loads((PROJECT / f"data/05_model_input/{OUTPUT}/tokens/current.json").read_text())
    table = open_split(PROJECT / f"data/05_model_input/{OUTPUT}/tokens" / pointer["key"], "train")
    plan = StepPlan(table.lengths, seed=42, effective_batch_rows=rows, max_steps=steps)
    order = [int(row) for step in range(steps) for row in plan.rows_of_step(step)]
    examples = [{"input_ids": table[row].input_ids.tolist(), "labels": labels_of(table[row]).tolist()} for row in order]
    tokenizer = load_tokenizer(base["name_or_path"])
    set_seed(42)
    model = load_model(base["name_or_path"])
    model = get_peft_model(
        model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    )

    class Clock(TrainerCallback):
        """Note when each step begins and ends."""

        def __init__(self) -> None:
            self.first = 0.0
            self.ends: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.first = self.first or time.time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.perf_counter())

    class InOrder(Trainer):
        """Keep the rows as listed."""

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    clock = Clock()
    trainer = InOrder(
        model=model,
        args=TrainingArguments(
            output_dir=str(PROJECT / f"data/06_models/{OUTPUT}/bare"),
            per_device_train_batch_size=rows,
            max_steps=steps,
            learning_rate=LEARNING_RATE,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            remove_unused_columns=False,
        ),
        train_dataset=examples,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        callbacks=[clock],
    )
    trainer.train()
    tokens = sum(len(example["input_ids"]) for example in examples[WARM_STEPS * rows :])
    seconds = clock.ends[-1] - clock.ends[WARM_STEPS - 1]
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    print(  # noqa: T201
        json.dumps({"tokens_per_second": tokens / seconds, "losses": losses, "first_step": clock.first})
    )


def kedro_parameters(steps: int, rows: int) -> str:
    """Write the benchmark's parameters as ``--params`` takes them."""
    parameters = {
        "output": OUTPUT,
        "train.effective_batch_rows": rows,
        "train.effective_batch_tokens": "null",
        "train.max_steps": steps,
        "train.learning_rate": LEARNING_RATE,
        "train.precision": "float32",
        "train.eval_every_steps": "null",
        "train.save_every_steps": "null",
        "train.lora.r": RANK,
        "train.lora.alpha": 2 * RANK,
    }
    return ",".join(f"{key}={value}" for key, value in parameters.items())


def kedro(pipelines: str, parameters: str) -> None:
    """Run pipelines through the command line's own entry point in this process, noting when the first step begins."""
    from kedro.framework.cli.cli import main as run

    if pipelines == "train":
        from lm_tuning.training import trainer

        step = trainer.StepPlanTrainer.training_step

        def noted(self: Any, *arguments: Any, **keywords: Any) -> Any:
            if "first_step" not in marks:
                marks["first_step"] = time.time()
                marks["look_seconds"] = self.health.seconds
            return step(self, *arguments, **keywords)

        marks: dict[str, float] = {}
        trainer.StepPlanTrainer.training_step = noted  # type: ignore[method-assign]
    sys.argv = ["kedro", "run", f"--pipelines={pipelines}", "--params", parameters]
    try:
        run()
    except SystemExit as end:
        if end.code:
            raise
    if pipelines == "train":
        sys.stdout.write("\n" + json.dumps(marks) + "\n")


def run_child(arguments: list[str]) -> tuple[float, str]:
    """Run this script in a process of its own; return when it began and what it printed."""
    began = time.time()
    command = [sys.executable, __file__, *arguments]
    environment = os.environ | {"COLUMNS": "200"}
    done = subprocess.run(command, cwd=PROJECT, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return began, done.stdout


def through_kedro(steps: int, rows: int) -> dict[str, Any]:
    """Train through the command line and read the efficiency file."""
    began, printed = run_child(["--kedro", "train", f"--steps={steps}", f"--rows={rows}"])
    marks = json.loads(printed.strip().splitlines()[-1])
    reports = PROJECT / f"data/08_reporting/{OUTPUT}"
    with (reports / "efficiency_summary.csv").open() as lines:
        efficiency = list(csv.DictReader(lines))
    with (reports / "training_summary.csv").open() as lines:
        losses = [float(row["loss_nats_per_token"]) for row in csv.DictReader(lines)]
    warm = efficiency[WARM_STEPS:]
    seconds = sum(float(row["seconds"]) for row in warm)
    return {
        "tokens_per_second": sum(int(row["num_tokens"]) for row in warm) / seconds,
        "losses": losses,
        "start_seconds": marks["first_step"] - began,
        "look_seconds": marks["look_seconds"],
    }


def through_trainer(steps: int, rows: int) -> dict[str, Any]:
    """Train with the bare script."""
    began, printed = run_child(["--bare", f"--steps={steps}", f"--rows={rows}"])
    figures: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    return figures | {"start_seconds": figures["first_step"] - began}


def main() -> None:
    """Run the pairs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--bare", action="store_true", help="run the bare side in this process")
    parser.add_argument("--kedro", help="run these pipelines in this process")
    options = parser.parse_args()
    if options.bare:
        bare(options.steps, options.rows)
        return
    if options.kedro:
        kedro(options.kedro, kedro_parameters(options.steps, options.rows))
        return
    say = sys.stdout.write
    for pipelines in ("split", "train"):  # the second one stores the tokens that both sides read
        run_child(["--kedro", pipelines, "--steps=2", f"--rows={options.rows}"])
    ratios, overheads, looks = [], [], []
    for pair in range(options.pairs):
        theirs = through_trainer(options.steps, options.rows)
        ours = through_kedro(options.steps, options.rows)
        ratios.append(ours["tokens_per_second"] / theirs["tokens_per_second"])
        overheads.append(ours["start_seconds"] - theirs["start_seconds"])
        looks.append(ours["look_seconds"])
        difference = max(abs(a - b) / b for a, b in zip(ours["losses"], theirs["losses"], strict=True))
        say(
            f"pair {pair + 1}: kedro {ours['tokens_per_second']:.1f} tokens/s, bare {theirs['tokens_per_second']:.1f}, "
            f"ratio {ratios[-1]:.3f}; last loss {ours['losses'][-1]:.4f} and {theirs['losses'][-1]:.4f} "
            f"(largest difference {difference:.2e}); first step after {ours['start_seconds']:.1f} s and "
            f"{theirs['start_seconds']:.1f} s, the checks before it {looks[-1]:.1f} s\n"
        )
        sys.stdout.flush()
    say(f"median ratio {statistics.median(ratios):.3f}, all {[round(ratio, 3) for ratio in ratios]}\n")
    say(
        f"median start-up over the bare script {statistics.median(overheads):.1f} s, of which "
        f"{statistics.median(looks):.1f} s are the checks before step 1\n"
    )


if __name__ == "__main__":
    main()
