"""Answer the held-out prompts of a finished run in three ways, side by side in one process.

    python benchmarks/generation.py [--output default] [--prompts 48] [--new 32] [--rows 16] [--rounds 3] [--device cpu]

Needs the tokens and the tuned adapter of a run, such as that of ``make run``. The ways are ``generate`` of transformers
in batches, longest prompts first, once with the adapter beside the weights and once merged into them, and continuous
batching with the merged adapter, which is what an evaluation does. Each round runs all three. Printed are seconds and
tokens per second of each, the median ratio over the first way, and how many answers are the same as its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PROJECT = Path(__file__).resolve().parents[1]
WAYS = ("generate, adapter apart", "generate, merged", "continuous, merged")


def main() -> None:
    """Answer in turns and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project", type=Path, default=PROJECT)
    parser.add_argument("--output", default="default")
    parser.add_argument("--split", default="test")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--new", type=int, default=32, help="longest answer, in tokens")
    parser.add_argument("--rows", type=int, default=16, help="prompts answered at once; 0: what the memory holds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()

    from lm_tuning.batching.held_out_loss import choose_rows
    from lm_tuning.generation import generate
    from lm_tuning.models.loading import load_tokenizer
    from lm_tuning.models.tuned import load_tuned, merge_adapter, read_tuning
    from lm_tuning.text.store.table import open_split

    folder = options.project / "data/06_models" / options.output / "tuned_model"
    tokens_key = read_tuning(folder)["tokens_key"]
    tokens = options.project / "data/05_model_input" / options.output / "tokens" / tokens_key
    table = open_split(tokens, options.split)
    prompts = generate.collect_prompts(table, choose_rows(len(table), options.prompts, 42))
    tokenizer = load_tokenizer(str(folder))
    apart = load_tuned(folder, dtype=options.dtype, device=options.device)
    merged = load_tuned(folder, dtype=options.dtype, device=options.device)
    assert merge_adapter(merged), "the adapter of this run cannot be merged"
    stop_ids = generate.find_stop_ids(apart, tokenizer, [])
    is_continuous = generate.takes_continuous_batches

    def answer(model: Any, *, continuous: bool) -> list[list[int]]:
        # What the product decides by the model's cache is decided here by hand.
        generate.takes_continuous_batches = is_continuous if continuous else lambda model: False
        return generate.generate_answers(
            model,
            [prompt.input_ids for prompt in prompts],
            max_new_tokens=options.new,
            batch_rows=options.rows or None,
            stop_ids=stop_ids,
            pad_id=int(tokenizer.pad_token_id),
            device=options.device,
        )

    ways: dict[str, Callable[[], list[list[int]]]] = {
        WAYS[0]: lambda: answer(apart, continuous=False),
        WAYS[1]: lambda: answer(merged, continuous=False),
        WAYS[2]: lambda: answer(merged, continuous=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    answers = {name: way() for name, way in ways.items()}  # warm, and the answers are the same each time
    for _ in range(options.rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - began)
    lengths = [len(prompt.input_ids) for prompt in prompts]
    say = sys.stdout.write
    say(f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens, {options.dtype} on {options.device}\n")
    for name in WAYS:
        num_tokens = sum(map(len, answers[name]))
        median = statistics.median(seconds[name])
        ratios = [first / other for first, other in zip(seconds[WAYS[0]], seconds[name], strict=True)]
        same = sum(one == other for one, other in zip(answers[WAYS[0]], answers[name], strict=True))
        say(
            f"{name:26} {median:7.2f} s {num_tokens / median:9.0f} tokens/s  x{statistics.median(ratios):.2f}"
            f"  same answers {same} of {len(prompts)}\n"
        )
    say(json.dumps({"seconds": seconds}) + "\n")


if __name__ == "__main__":
    main()
