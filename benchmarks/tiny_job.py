"""A few chat rows with a mark in each, and a tiny random model with a tokenizer whose tokens are characters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MARK = "zqxjkvwz"
"""Every letter is a token, so the mark's ids follow each other in what holds a row, and nowhere else."""
NUM_ROWS = 6

LETTERS = [chr(number) for number in range(32, 127)] + ["\n"]
SPECIALS = ["<pad>", "<bos>", "<eos>", "<unk>", "<|user|>", "<|assistant|>", "<|end|>"]
VOCABULARY = {token: index for index, token in enumerate([*SPECIALS, *LETTERS])}
MARK_IDS = [VOCABULARY[letter] for letter in MARK]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tiny_model(folder: Path) -> None:
    """Write a random Llama of two layers with a tokenizer of single characters."""
    import torch
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel(dict(VOCABULARY), unk_token=SPECIALS[3]))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    names = {"bos_token": "<bos>", "eos_token": "<|end|>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=512, **names)  # type: ignore[no-untyped-call]
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=VOCABULARY["<bos>"],
        eos_token_id=VOCABULARY["<|end|>"],
        pad_token_id=VOCABULARY["<pad>"],
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_rows(file: Path) -> None:
    """Write chat rows, no two alike, with the mark in each question and each answer.

    A loop over rows keeps its last one until it returns, whichever that is, so all have the mark.
    """
    words = ["one", "two", "three", "four", "five", "six"]
    assert len(words) == NUM_ROWS
    rows = [
        [
            {"role": "user", "content": f"Say {word} {MARK} now?"},
            {"role": "assistant", "content": f"Then {word} {MARK} it is."},
        ]
        for word in words
    ]
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
