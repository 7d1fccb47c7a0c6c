"""Compare tokenizing through this project with the bare Rust tokenizer on the same rows, in one process.

    python benchmarks/tokenizer_speed.py [--rows 40000] [--pairs 5] [--kinds text prompt_response messages]

Rows are made of words with a Zipf distribution, 535 characters at the mean. The bare side is what one would write by
hand: for running text the faster of ``encode_batch`` and ``encode_batch_fast`` on lists of texts, then ``.ids``; for
conversations ``apply_chat_template(tokenize=False)`` row by row before that. Our side is ``write_tokens``: stored rows
in, stored tokens with proven loss spans out. Both sides alternate and use all cores. Printed are tokens per second and
CPU seconds of each pair, the median ratio, and whether both sides made the same tokens: ours end the text with the EOS
token, and leave out the line break that a template writes after the last turn. What is done once, such as the table of
the tokens' bytes (0.1 s), is in our time, so few rows say little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

PROJECT = Path(__file__).resolve().parents[1]
BATCH_ROWS = 1024
MEAN_CHARACTERS = 535


def make_texts(num_rows: int, *, seed: int = 0) -> list[str]:
    """Write texts of made-up words, frequent ones often."""
    rng = np.random.default_rng(seed)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    shares = 1 / np.arange(1, 27) ** 0.7
    words = ["".join(rng.choice(letters, size=rng.integers(2, 11), p=shares / shares.sum())) for _ in range(20_000)]
    ranks = 1 / np.arange(1, len(words) + 1) ** 1.05
    cumulative = np.cumsum(ranks / ranks.sum())
    texts = []
    for length in np.maximum(rng.normal(MEAN_CHARACTERS, 120, size=num_rows), 40).astype(int):
        picked = np.minimum(np.searchsorted(cumulative, rng.random(length // 4)), len(words) - 1)
        texts.append(" ".join([words[i] for i in picked])[:length].rstrip())
    return texts


def as_row(text: str, kind: str) -> tuple[Any, ...]:
    """Return the fields of a row, the text divided over its turns."""
    if kind == "text":
        return (text,)
    if kind == "prompt_response":
        middle = text.index(" ", len(text) // 2)
        return text[:middle], text[middle + 1 :], None
    words = text.split(" ")
    quarter = len(words) // 4
    parts = [" ".join(words[i * quarter : (i + 1) * quarter if i < 3 else len(words)]) for i in range(4)]
    roles = ("user", "assistant", "user", "assistant")
    turns = [{"role": role, "content": part} for role, part in zip(roles, parts, strict=True)]
    return json.dumps(turns), None


def store(folder: Path, kind: str, rows: list[tuple[Any, ...]]) -> None:
    """Write rows as the split pipeline stores them."""
    from lm_tuning.data.records import SPLITS
    from lm_tuning.data.store import ExampleWriter

    for split in SPLITS:
        with ExampleWriter(folder / f"{split}.arrow", kind) as writer:
            for row_id, row in enumerate(rows if split == "train" else [], 1):
                writer.append(row_id, row)
    summary = {
        "files": [{"path": "made-up rows", "split": "train", "first_row_id": 1}],
        "sources": [{"path": "made-up rows", "weight": 1.0, "num_rows": len(rows)}],
    }
    (folder / "summary.json").write_text(json.dumps(summary))


def run_bare(tokenizer: Any, kind: str, rows: list[tuple[Any, ...]], *, fast: bool) -> int:
    """Tokenize by hand and return the number of tokens."""
    backend = tokenizer.backend_tokenizer
    encode = backend.encode_batch_fast if fast else backend.encode_batch
    num_tokens = 0
    for start in range(0, len(rows), BATCH_ROWS):
        batch = rows[start : start + BATCH_ROWS]
        if kind == "text":
            texts = [row[0] for row in batch]
        elif kind == "messages":
            texts = [tokenizer.apply_chat_template(json.loads(row[0]), tokenize=False) for row in batch]
        else:
            texts = [
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": row[0]}, {"role": "assistant", "content": row[1]}], tokenize=False
                )
                for row in batch
            ]
        num_tokens += sum(len(encoding.ids) for encoding in encode(texts, add_special_tokens=False))
    return num_tokens


def run_ours(tokenizer: Any, examples: Path) -> int:
    """Tokenize through the project and return the number of tokens."""
    from lm_tuning.parameters.data import TokenizeParameters
    from lm_tuning.text.tokenize import write_tokens

    with tempfile.TemporaryDirectory() as folder:
        summary = write_tokens(Path(folder), examples, tokenizer, TokenizeParameters(max_length_tokens=2048))
    facts = summary["splits"]["train"]
    assert not facts["dropped"] and not facts["changed"], facts
    return int(facts["num_tokens"])


def measure(call: Callable[[], int]) -> tuple[int, float, float]:
    """Return tokens, seconds and CPU seconds of a call."""
    began, cpu_began = time.perf_counter(), time.process_time()
    num_tokens = call()
    return num_tokens, time.perf_counter() - began, time.process_time() - cpu_began


def main() -> None:
    """Run the pairs and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--pairs", type=int, default=5)
    kinds = ["text", "prompt_response", "messages"]
    parser.add_argument("--kinds", nargs="+", default=kinds, choices=kinds)
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    sys.path.insert(0, str(PROJECT / "src"))
    from lm_tuning.models.base_model import EMBEDDED_MODEL
    from lm_tuning.models.loading import load_tokenizer

    say = sys.stdout.write
    tokenizer = load_tokenizer(str(PROJECT / EMBEDDED_MODEL))
    texts = make_texts(options.rows)
    for kind in options.kinds:
        rows = [as_row(text, kind) for text in texts]
        with tempfile.TemporaryDirectory() as scratch:
            examples = Path(scratch)
            store(examples, kind, rows)
            sides: dict[str, Callable[[], int]] = {
                "encode_batch": lambda kind=kind, rows=rows: run_bare(tokenizer, kind, rows, fast=False),
                "encode_batch_fast": lambda kind=kind, rows=rows: run_bare(tokenizer, kind, rows, fast=True),
                "write_tokens": lambda examples=examples: run_ours(tokenizer, examples),
            }
            ratios, cpu_ratios = [], []
            for pair in range(options.pairs):
                results = {name: measure(call) for name, call in sides.items()}
                ours = results.pop("write_tokens")
                bare_name, bare = min(results.items(), key=lambda item: item[1][1])
                ratios.append(ours[0] / ours[1] / (bare[0] / bare[1]))
                cpu_ratios.append(ours[2] / min(result[2] for result in results.values()))
                # Text gets an EOS token; a conversation loses the line break after its last turn.
                agree = ours[0] - bare[0] == (len(rows) if kind == "text" else -len(rows))
                say(
                    f"{kind} pair {pair + 1}: write_tokens {ours[0] / ours[1]:,.0f} tokens/s ({ours[2]:.2f} s CPU), "
                    f"bare {bare_name} {bare[0] / bare[1]:,.0f} ({bare[2]:.2f} s CPU), ratio {ratios[-1]:.3f}; "
                    f"{'same tokens' if agree else 'OTHER TOKENS'}\n"
                )
                sys.stdout.flush()
            say(
                f"{kind}: median ratio {statistics.median(ratios):.3f}, CPU time {statistics.median(cpu_ratios):.2f} "
                "times the bare one's\n"
            )


if __name__ == "__main__":
    main()
