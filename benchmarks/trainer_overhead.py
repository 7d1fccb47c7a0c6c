"""Compare ``kedro run --pipelines=train`` with a bare Hugging Face ``Trainer`` on the same rows.

    python benchmarks/trainer_overhead.py [--pairs 5] [--steps 12] [--rows 8]

Both sides train the stored token set of the default output with the same model, adapter, optimizer, precision
(float32) and rows a step, in processes of their own that alternate. The bare script is what one would write by
hand: a list of rows, ``DataCollatorForSeq2Seq``, ``Trainer.train()``. Printed are tokens per second over the
steps after the second one, the ratio of each pair, their median, the losses of both sides, and the seconds from
the start of a process to its first step.
"""

from __future__ import annotations

import argparse
import csv
import json
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
    began = time.time()
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainerCallback, TrainingArguments, set_seed

    from lm_tuning.models.loading import load_model, load_tokenizer
    from lm_tuning.text.token_table import labels_of, open_split
    from lm_tuning.training.step_plan import StepPlan

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
        """Take the rows as listed."""

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
        json.dumps({"tokens_per_second": tokens / seconds, "losses": losses, "start_seconds": clock.first - began})
    )


def run_kedro(steps: int, rows: int, pipelines: str) -> float:
    """Run pipelines with the benchmark's parameters and return the seconds that took."""
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
    text = ",".join(f"{key}={value}" for key, value in parameters.items())
    began = time.time()
    subprocess.run(
        [sys.executable, "-m", "kedro", "run", f"--pipelines={pipelines}", "--params", text],
        cwd=PROJECT,
        check=True,
        capture_output=True,
    )
    return time.time() - began


def through_kedro(steps: int, rows: int) -> dict[str, Any]:
    """Train through the command line and read the efficiency file."""
    total = run_kedro(steps, rows, "train")
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
        "other_seconds": total - sum(float(row["seconds"]) for row in efficiency),
    }


def main() -> None:
    """Run the pairs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--bare", action="store_true", help="run the bare side in this process")
    options = parser.parse_args()
    if options.bare:
        bare(options.steps, options.rows)
        return
    say = sys.stdout.write
    run_kedro(2, options.rows, "split")
    run_kedro(2, options.rows, "train")  # stores the tokens that both sides read
    ratios = []
    for pair in range(options.pairs):
        command = [sys.executable, __file__, "--bare", f"--steps={options.steps}", f"--rows={options.rows}"]
        began = time.time()
        printed = subprocess.run(command, cwd=PROJECT, check=True, capture_output=True, text=True).stdout
        bare_total = time.time() - began
        theirs = json.loads(printed.strip().splitlines()[-1])
        ours = through_kedro(options.steps, options.rows)
        ratios.append(ours["tokens_per_second"] / theirs["tokens_per_second"])
        difference = max(abs(a - b) / b for a, b in zip(ours["losses"], theirs["losses"], strict=True))
        say(
            f"pair {pair + 1}: kedro {ours['tokens_per_second']:.1f} tokens/s, bare {theirs['tokens_per_second']:.1f}, "
            f"ratio {ratios[-1]:.3f}; last loss {ours['losses'][-1]:.4f} and {theirs['losses'][-1]:.4f} "
            f"(largest difference {difference:.2e}); outside the steps: kedro {ours['other_seconds']:.1f} s, "
            f"bare {bare_total - sum_step_seconds(theirs, bare_total):.1f} s\n"
        )
        sys.stdout.flush()
    say(f"median ratio {statistics.median(ratios):.3f}, all {[round(ratio, 3) for ratio in ratios]}\n")


def sum_step_seconds(result: dict[str, Any], total: float) -> float:
    """Return the seconds of a bare run that were steps: all after its start-up."""
    return total - float(result["start_seconds"])


if __name__ == "__main__":
    main()
