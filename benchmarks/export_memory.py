"""Measure the memory that merging an adapter takes, as a multiple of the model's size, on random weights.

    python benchmarks/export_memory.py [--layers 8] [--hidden 1536] [--dtype bfloat16]

A Llama of this shape is written in the dtype with a LoRA adapter on every linear layer. A process of its own then does
what the export does after it has its reference: it loads the base in the dtype of its files, puts the adapter on it,
merges layer by layer and writes the result. Printed are the size of the base's files and the peak memory of that
process, libraries included: its own (``RssAnon``, every 10 ms) and all resident (``VmHWM``). The latter counts pages of
the base's files as well, which are mapped while they are read, and which the system takes back when memory is needed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any


def make(folder: Path, layers: int, hidden: int, dtype: str) -> None:
    """Write a random base, its tokenizer, and an adapter."""
    import torch
    from peft import LoraConfig, get_peft_model
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    model: Any = LlamaForCausalLM._from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder / "base", max_shard_size="1GB")
    core = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.pad_token, tokenizer.eos_token = "<pad>", "<eos>"
    tokenizer.save_pretrained(folder / "base")
    wrapped = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False))
    wrapped.save_pretrained(folder / "adapter")


def merge(folder: Path, dtype: Any) -> None:
    """Merge as the export does, and print the peak of this process."""
    import peft  # noqa: F401 - what importing costs is not the merge's
    import transformers  # noqa: F401

    from lm_tuning.export.merge import merge_layers, write_weights
    from lm_tuning.models.loading import load_model
    from lm_tuning.models.tuned import attach_adapter

    before, peaks = read_status("RssAnon"), [0]

    def watch() -> None:
        while True:
            peaks[0] = max(peaks[0], read_status("RssAnon"))
            time.sleep(0.01)

    threading.Thread(target=watch, daemon=True).start()
    merged = merge_layers(attach_adapter(load_model(str(folder / "base"), dtype=dtype), folder / "adapter"), dtype)
    write_weights(merged.model, folder / "export", dtype)
    found = {"before": before, "own": peaks[0], "resident": read_status("VmHWM"), "layers": merged.num_layers}
    report(json.dumps(found))


def read_status(name: str) -> int:
    """Return a figure of this process from the kernel, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def report(line: str) -> None:
    """Print a line of the result."""
    print(line)  # noqa: T201


def main() -> None:
    """Make, merge and compare with the size of the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--part", choices=["make", "merge"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part == "make":
        make(given.folder, given.layers, given.hidden, given.dtype)
        return
    if given.part == "merge":
        merge(given.folder, given.dtype)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for part in ("make", "merge"):
            done = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--part", part, "--folder", folder],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                sys.exit(done.stderr)
            found = json.loads(done.stdout.splitlines()[-1]) if part == "merge" else {}
        size = sum(path.stat().st_size for path in Path(folder, "base").glob("*.safetensors"))
        written = sum(path.stat().st_size for path in Path(folder, "export").glob("*.safetensors"))
    mebi, layers = 2**20, found["layers"]
    report(f"base {size / mebi:,.0f} MiB in {given.dtype}, export {written / mebi:,.0f} MiB, {layers} layers merged")
    report(f"own peak {found['own'] / mebi:,.0f} MiB: {found['own'] / size:.2f} x the model's size")
    report(f"resident peak {found['resident'] / mebi:,.0f} MiB: {found['resident'] / size:.2f} x")
    rest = found["own"] - found["before"]
    report(f"own peak without the {found['before'] / mebi:,.0f} MiB of libraries: {rest / size:.2f} x")


if __name__ == "__main__":
    main()
