"""Rows and tiny random models of every task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from lm_tuning.text.store.table import TokenTableWriter
from tests.support.tiny import BOS, END, EOS, PAD, VOCABULARY, bart_config, ids, make_tokenizer
from tests.training.conftest import WORDS, write_rows

LABELS = ("cat", "dog", "bird")


def label_map(num_classes: int = len(LABELS)) -> dict[str, int]:
    """Name the classes."""
    return {LABELS[index] if index < len(LABELS) else f"class {index}": index for index in range(num_classes)}


def write_labelled(folder: Path, split: str, num_rows: int, *, seed: int = 0, num_classes: int = 3) -> None:
    """Write texts of very different lengths, each with a class."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    with TokenTableWriter(folder / f"{split}.arrow") as writer:
        for row_id in range(1, num_rows + 1):
            label = int(random.integers(num_classes))
            text = WORDS[label % len(WORDS)] * int(random.integers(1, 6))
            writer.append(row_id, [BOS, *ids(text)], [], label=label)


def write_pairs(folder: Path, split: str, num_rows: int, *, seed: int = 0) -> None:
    """Write sources with targets, both ended."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    with TokenTableWriter(folder / f"{split}.arrow") as writer:
        for row_id in range(1, num_rows + 1):
            word = WORDS[int(random.integers(len(WORDS)))]
            source = [*ids(word * int(random.integers(1, 4))), EOS]
            target = [*ids(word[: int(random.integers(1, len(word)))]), EOS]
            writer.append(row_id, [*source, *target], [(len(source), len(source) + len(target))])


WRITERS = {"causal_lm": write_rows, "sequence_classification": write_labelled, "seq2seq_lm": write_pairs}


def write_task_rows(task: str, folder: Path, *, num_train: int = 11) -> Path:
    """Write training, validation and test rows of a task."""
    write: Any = WRITERS[task]
    for seed, (split, num_rows) in enumerate([("train", num_train), ("validation", 6), ("test", 6)]):
        write(folder, split, num_rows, seed=seed)
    return folder


def save_tiny_bart(folder: Path) -> Path:
    """Write a random encoder-decoder and the character tokenizer."""
    from transformers import BartForConditionalGeneration

    config = bart_config(
        max_position_embeddings=256, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, init_std=0.2
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    BartForConditionalGeneration(config).save_pretrained(folder)
    torch.random.set_rng_state(state)
    make_tokenizer(chat_template=None, eos_token="<eos>").save_pretrained(folder)
    return folder


def save_tiny_t5(folder: Path, *, is_first_version: bool = True) -> Path:
    """Write a random T5 and the character tokenizer.

    The first version scales what goes into its head, which is the embedding; 1.1, of which Flan-T5 and mT5 are, does
    not, and has a head of its own and gated layers.
    """
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=len(VOCABULARY),
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="relu" if is_first_version else "gated-gelu",
        tie_word_embeddings=is_first_version,
        pad_token_id=PAD,
        eos_token_id=EOS,
        decoder_start_token_id=PAD,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(config)
    if not is_first_version:
        model.lm_head.weight = torch.nn.Parameter(0.2 * torch.randn_like(model.lm_head.weight))
    model.save_pretrained(folder)
    torch.random.set_rng_state(state)
    make_tokenizer(chat_template=None, eos_token="<eos>").save_pretrained(folder)
    return folder


def save_tiny_qwen3(folder: Path) -> Path:
    """Write a random Qwen3 language model, whose EOS token is its padding."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        eos_token_id=END,
        pad_token_id=END,
        initializer_range=0.1,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    torch.random.set_rng_state(state)
    make_tokenizer(pad_token="<|end|>").save_pretrained(folder)
    return folder
