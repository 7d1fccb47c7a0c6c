"""Answer the same prompts in several ways, side by side in one process.

    python benchmarks/generation.py [--output default] [--prompts 48] [--new 32] [--rows 16] [--rounds 3] [--device cpu]
    python benchmarks/generation.py --shape 135m [--prompts 256] [--prompt-tokens 100] [--new 128]

The first takes the held-out prompts and the tuned adapter of a finished run, such as that of ``make run``; the second a
model of that shape with random weights and random prompts, whose answers never end early. The ways are ``generate`` of
transformers in batches, longest prompts first: with the adapter beside the weights (of a run alone) and merged into
them, and on a GPU with ``--static`` on a compiled static cache too; and what an evaluation does. Each round runs them
all. Printed are seconds and tokens per second of each, the median ratio over the first way, and how many answers are
the same as its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PROJECT = Path(__file__).resolve().parents[1]
# Llama and Qwen3 shapes: width, layers, heads, key heads, head size, width of the feed-forward part, vocabulary.
SHAPES = {
    "tiny": (64, 2, 4, 2, 16, 128, 512),
    "135m": (576, 30, 9, 3, 64, 1536, 49152),
    "0.6b": (1024, 28, 16, 8, 128, 3072, 151936),
    "4b": (2560, 36, 32, 8, 128, 9728, 151936),
}


@dataclass(frozen=True)
class Work:
    """What is answered, and by which models.

    Attributes:
        models: by the name of the way.
        prompts: token ids of each.
        stop_ids: EOS tokens of an answer.
        pad_id: fills shorter prompts.
    """

    models: dict[str, Any]
    prompts: list[list[int]]
    stop_ids: Sequence[int]
    pad_id: int


def main() -> None:
    """Answer in turns and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project", type=Path, default=PROJECT)
    parser.add_argument("--output", default="default")
    parser.add_argument("--split", default="test")
    parser.add_argument("--shape", choices=SHAPES, help="random weights instead of a run's")
    parser.add_argument("--prompt-tokens", type=int, default=100, help="of each random prompt")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--new", type=int, default=32, help="longest answer, in tokens")
    parser.add_argument("--rows", type=int, default=16, help="prompts answered at once; 0: what the memory holds")
    parser.add_argument("--peer-rows", type=int, help="the same for generate of transformers; as --rows, or all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--static", action="store_true", help="also generate on a compiled static cache")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    work = _random_work(options) if options.shape else _work_of_run(options)
    _compare(work, options)


def _work_of_run(options: argparse.Namespace) -> Work:
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
    return Work(
        models={"transformers, adapter apart": apart, "transformers, merged": merged, "this project": merged},
        prompts=[prompt.input_ids for prompt in prompts],
        stop_ids=generate.find_stop_ids(apart, tokenizer, []),
        pad_id=int(tokenizer.pad_token_id),
    )


def _random_work(options: argparse.Namespace) -> Work:
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    width, layers, heads, key_heads, head, inner, words = SHAPES[options.shape]
    family = LlamaConfig if options.shape in ("tiny", "135m") else Qwen3Config
    config = family(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head,
        intermediate_size=inner,
        vocab_size=words,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype)).eval()
    # (prompts, tokens)
    prompts = torch.randint(5, words, (options.prompts, options.prompt_tokens)).tolist()
    return Work({"transformers, merged": model, "this project": model}, prompts, stop_ids=[], pad_id=2)


def _compare(work: Work, options: argparse.Namespace) -> None:
    from lm_tuning.generation import generate
    from lm_tuning.parameters import GenerationParameters

    takes_continuous_batches = generate.takes_continuous_batches
    peer_rows = options.peer_rows or options.rows or len(work.prompts)

    def answer(model: Any, *, ours: bool) -> list[list[int]]:
        # What the product decides by the model's cache is decided here by hand.
        generate.takes_continuous_batches = takes_continuous_batches if ours else lambda model: False
        answers = generate.generate_answers(
            model,
            work.prompts,
            generation=GenerationParameters(max_new_tokens=options.new),
            batch_rows=(options.rows or None) if ours else peer_rows,
            stop_ids=work.stop_ids,
            pad_id=work.pad_id,
            device=options.device,
        )
        return [one.ids for one in answers]

    def make(name: str) -> Callable[[], list[list[int]]]:
        return lambda: answer(work.models[name], ours=name == "this project")

    ways = {name: make(name) for name in work.models}
    if options.static:
        model = work.models["transformers, merged"]
        ways["transformers, static cache"] = lambda: _answer_on_static_cache(model, work, options, peer_rows)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    # Warm, and the answers are the same each time.
    answers = {name: way() for name, way in ways.items()}
    for _ in range(options.rounds):
        for name, way in ways.items():
            _wait(options.device)
            began = time.perf_counter()
            way()
            _wait(options.device)
            seconds[name].append(time.perf_counter() - began)
    _print(work, options, answers, seconds)


def _answer_on_static_cache(model: Any, work: Work, options: argparse.Namespace, batch_rows: int) -> list[list[int]]:
    """Answer by ``generate`` with its static cache, whose decoding transformers compiles by itself."""
    from lm_tuning.generation.answers import finish_answer
    from lm_tuning.generation.reading_prompts import pad_prompts

    order = sorted(range(len(work.prompts)), key=lambda index: -len(work.prompts[index]))
    answers: list[list[int]] = [[] for _ in order]
    for first in range(0, len(order), batch_rows):
        chosen = order[first : first + batch_rows]
        input_ids, mask = pad_prompts([work.prompts[index] for index in chosen], pad_id=work.pad_id, side="left")
        with torch.no_grad():
            output = model.generate(
                input_ids=input_ids.to(options.device),
                attention_mask=mask.to(options.device),
                max_new_tokens=options.new,
                do_sample=False,
                eos_token_id=list(work.stop_ids) or None,
                pad_token_id=work.pad_id,
                cache_implementation="static",
            )
        for index, tokens in zip(chosen, output[:, input_ids.shape[1] :].tolist(), strict=True):
            answers[index] = finish_answer(tokens, None, stop_ids=work.stop_ids, stop_strings=None).ids
    return answers


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _print(
    work: Work, options: argparse.Namespace, answers: dict[str, list[list[int]]], seconds: dict[str, list[float]]
) -> None:
    lengths = [len(prompt) for prompt in work.prompts]
    say = sys.stdout.write
    card = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    weights = f"{options.shape}, random weights" if options.shape else f"output {options.output}"
    say(f"{weights}; {len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens, at most {options.new} new; ")
    say(f"{options.dtype} on {card}, torch {torch.__version__}\n")
    first = next(iter(answers))
    for name, found in answers.items():
        num_tokens = sum(map(len, found))
        median = statistics.median(seconds[name])
        ratios = [one / other for one, other in zip(seconds[first], seconds[name], strict=True)]
        same = sum(one == other for one, other in zip(answers[first], found, strict=True))
        say(
            f"{name:28} {median:8.3f} s {num_tokens / median:9.0f} tokens/s  x{statistics.median(ratios):.2f}"
            f"  same answers {same} of {len(found)}\n"
        )
    say(json.dumps({"seconds": seconds}) + "\n")


if __name__ == "__main__":
    main()
