"""Train a random-weight Qwen3 shape through ``run_training`` on the device that is there, and report figures.

    python benchmarks/gpu_training.py [--shape 0.6b] [--methods lora full] [--classes 280]

Needs neither Kedro nor MLflow. Rows are random tokens with the lengths of short classification texts (mean 211
tokens, at most 287), all of them supervised. For each method (``lora`` and ``full``; ``qlora`` is NF4 with double
quantization) it prints losses, gradient norms, tokens per second, padding, peak memory, the loader's wait share and the
health findings; before that, what the backend flags read back as. The weights are random, so losses only tell that the
arithmetic is right: the first one must be near log(vocabulary) plus half the variance of the random head's logits.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT), str(PROJECT / "src")]

SHAPES = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 16, "intermediate_size": 128, "vocab_size": 512},
    "0.6b": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
             "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936},
    "4b": {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
           "head_dim": 128, "intermediate_size": 9728, "vocab_size": 151936},
}  # fmt: skip


def make_model(folder: Path, shape: str) -> None:
    """Write a random model and a tokenizer for it."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tests.support.tiny import END, PAD, make_tokenizer

    torch.manual_seed(0)
    config = Qwen3Config(**SHAPES[shape], tie_word_embeddings=True, pad_token_id=PAD, eos_token_id=END)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    make_tokenizer().save_pretrained(folder)


def make_tokens(folder: Path, num_rows: int, vocabulary: int, num_classes: int | None) -> None:
    """Write random rows whose tokens are all supervised, or that each have a class."""
    from lm_tuning.text.store.table import TokenTableWriter

    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for split, count in (("train", num_rows), ("validation", 0)):
        with TokenTableWriter(folder / f"{split}.arrow") as writer:
            for row in range(count):
                length = int(np.clip(random.normal(211.5, 40), 30, 287))
                ids = random.integers(8, min(vocabulary, 49000), length)
                if num_classes is None:
                    writer.append(row + 1, ids, [(0, length)])
                else:
                    writer.append(row + 1, ids, [], label=int(random.integers(num_classes)))


def main() -> None:
    """Build model and rows, train both ways and print one JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--methods", nargs="+", choices=("lora", "qlora", "full"), default=["lora", "full"])
    parser.add_argument("--batchings", nargs="+", choices=("padded", "packed"), default=["padded", "packed"])
    parser.add_argument("--classes", type=int, help="train a classifier of so many classes, not a language model")
    parser.add_argument("--micro-batch-tokens", type=int, help="most positions of a micro-batch")
    parser.add_argument("--checkpointing", action="store_true", help="compute activations again in the backward pass")
    options = parser.parse_args()

    import torch
    import transformers
    from random_base import random_base

    from lm_tuning.parameters import TrainParameters
    from lm_tuning.runtime.backend import apply_backend
    from lm_tuning.runtime.device import describe_device
    from lm_tuning.runtime.precision import choose_precision
    from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training

    say = sys.stdout.write
    device = describe_device()
    say(f"{device}\ntorch {torch.__version__}, transformers {transformers.__version__}\n")
    for fact in apply_backend(
        tf32=True, flash_sdp=True, mem_efficient_sdp=True, reproducibility="fast", num_threads="auto"
    ):
        say(f"{fact}\n")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_model(folder / "model", options.shape)
        vocabulary = SHAPES[options.shape]["vocab_size"]
        make_tokens(folder / "tokens", options.rows * options.steps, vocabulary, options.classes)
        base = random_base(folder / "model")
        for method in options.methods:
            precision = choose_precision(device, method=method)
            train = TrainParameters(
                method=method,
                micro_batch_tokens=options.micro_batch_tokens or "auto",
                gradient_checkpointing=options.checkpointing,
                learning_rate=1e-4,
                effective_batch_rows=options.rows,
                max_steps=options.steps,
                trainer={"lr_scheduler_type": "constant"},
            )
            settings = TrainingSettings(
                train=train,
                base=base,
                task="sequence_classification" if options.classes else "causal_lm",
                label_map={f"class {index}": index for index in range(options.classes)} if options.classes else None,
                tokens_key="random",
                weights_dtype=precision.weights,
                compute_dtype=precision.compute,
                device=device.kind,
                seed=0,
            )
            for batching in options.batchings:
                if torch.cuda.is_available():
                    gc.collect()
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                result = run_training(
                    TrainingPaths(folder / "tokens", folder / "runs"),
                    replace(settings, train=train.model_copy(update={"batching": batching})),
                )
                unit = result.summary["unit"]
                row = {
                    "method": method,
                    "batching": batching,
                    "log_of_classes": round(math.log(options.classes or vocabulary), 4),
                    "measured": result.health["facts"][f"first_step_measured_nats_per_{unit}"],
                    "losses": [round(step[f"loss_nats_per_{unit}"], 4) for step in result.steps],
                    "micro_batches": result.efficiency[0]["num_micro_batches"],
                    "gradient_norms": [round(step["gradient_norm"], 4) for step in result.steps],
                    "findings": [finding["code"] for finding in result.health["findings"]],
                    **{key: result.summary[key] for key in (
                        "tokens_per_second", "padding_fraction", "loader_wait_fraction", "logging_fraction",
                        "peak_memory_bytes", "step_seconds_median", "health_seconds")},
                }  # fmt: skip
                say(json.dumps(row) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
