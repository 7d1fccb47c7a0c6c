"""The works that ``throughput.py`` measures: shapes of models, lengths of rows, and random rows and models of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LENGTHS = Path(__file__).resolve().parent / "lengths"


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3.

    Attributes:
        hidden: features of a position.
        layers: decoder layers.
        heads: attention heads.
        key_heads: heads of keys and values.
        head: features of a head.
        wide: features inside the feed-forward part.
        vocabulary: tokens.
        tied: whether the head's weights are those of the embedding.
    """

    hidden: int
    layers: int
    heads: int
    key_heads: int
    head: int
    wide: int
    vocabulary: int
    tied: bool = True

    def num_matrix_weights(self, num_outputs: int) -> int:
        """Return how many weights every token is multiplied with.

        Args:
            num_outputs: rows of the head.
        """
        attention = self.hidden * self.heads * self.head * 2 + 2 * self.hidden * self.key_heads * self.head
        return self.layers * (attention + 3 * self.hidden * self.wide) + num_outputs * self.hidden


SHAPES = {
    "tiny": Shape(64, 2, 4, 2, 16, 128, 512),
    "135m": Shape(576, 30, 9, 3, 64, 1536, 49152),
    "0.6b": Shape(1024, 28, 16, 8, 128, 3072, 151936),
    "1.7b": Shape(2048, 28, 16, 8, 128, 6144, 151936),
    "4b": Shape(2560, 36, 32, 8, 128, 9728, 151936),
    "8b": Shape(4096, 36, 32, 8, 128, 12288, 151936, tied=False),
}


@dataclass(frozen=True)
class Work:
    """What is trained.

    Attributes:
        shape: of the model, a key of ``SHAPES``.
        method: ``lora``, ``qlora`` or ``full``.
        budget: tokens of a micro-batch of ours.
        rows: rows of a batch that the others begin with.
        num_classes: classes of a classification, 0 for a language model.
    """

    shape: str
    method: str
    budget: int
    rows: int = 16
    num_classes: int = 0

    @property
    def flops_per_token(self) -> int:
        """Return floating-point operations per real token: 4 per frozen weight and 6 per trained one."""
        shape = SHAPES[self.shape]
        # A head of classes has a row per class, and is asked once a row.
        num_weights = shape.num_matrix_weights(0 if self.num_classes else shape.vocabulary)
        return (6 if self.method == "full" else 4) * num_weights


WORKS = {
    "8b-lora": Work("8b", "lora", 12288),
    "4b-lora": Work("4b", "lora", 12288),
    "4b-qlora": Work("4b", "qlora", 12288),
    "4b-lora-classes": Work("4b", "lora", 12288, num_classes=280),
    "1.7b-full": Work("1.7b", "full", 16384),
    "0.6b-lora": Work("0.6b", "lora", 16384),
    "0.6b-full": Work("0.6b", "full", 16384),
    "0.6b-lora-classes": Work("0.6b", "lora", 16384, num_classes=280),
    "135m-lora": Work("135m", "lora", 16384, rows=32),
    "135m-full": Work("135m", "full", 16384, rows=32),
    "135m-lora-classes": Work("135m", "lora", 16384, rows=32, num_classes=280),
    "tiny-lora": Work("tiny", "lora", 1024, rows=2),
    "tiny-qlora": Work("tiny", "qlora", 1024, rows=2),
    "tiny-full": Work("tiny", "full", 1024, rows=2),
    "tiny-lora-classes": Work("tiny", "lora", 1024, rows=2, num_classes=7),
}


def draw_lengths(kind: str, count: int) -> np.ndarray:
    """Draw row lengths in tokens, the same for every framework.

    Args:
        kind: ``report``, or the name of a file in ``lengths``.
        count: rows.

    Returns:
        Lengths, ``(rows,)``.
    """
    random = np.random.default_rng(0)
    if kind == "report":
        return np.clip(random.normal(211.5, 40, count), 30, 287).astype(int)
    counts = json.loads((LENGTHS / f"{kind}.json").read_text())["rows_by_tokens"]
    lengths = np.array([int(length) for length in counts])
    rows = np.array(list(counts.values()), dtype=float)
    return random.choice(lengths, count, p=rows / rows.sum())


def draw_rows(kind: str, count: int, vocabulary: int) -> list[np.ndarray]:
    """Draw rows of random tokens.

    Args:
        kind: of the lengths.
        count: rows.
        vocabulary: tokens of the model.
    """
    random = np.random.default_rng(1)
    return [random.integers(8, min(vocabulary, 49000), length) for length in draw_lengths(kind, count)]


def draw_classes(count: int, num_classes: int) -> np.ndarray:
    """Draw a class for each row, ``(rows,)``."""
    return np.random.default_rng(2).integers(0, num_classes, count)


def make_config(shape: str) -> Any:
    """Return the configuration of a Qwen3 of that shape."""
    from transformers import Qwen3Config

    size = SHAPES[shape]
    return Qwen3Config(
        hidden_size=size.hidden, num_hidden_layers=size.layers, num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads, head_dim=size.head, intermediate_size=size.wide,
        vocab_size=size.vocabulary, tie_word_embeddings=size.tied, max_position_embeddings=40960, pad_token_id=0,
        eos_token_id=7, bos_token_id=7, rope_theta=1e6,
    )  # fmt: skip


def make_model(shape: str, dtype: str, attention: str, *, num_classes: int = 0) -> Any:
    """Build a random model on the device.

    Args:
        shape: a key of ``SHAPES``.
        dtype: of the weights.
        attention: transformers' name of the implementation.
        num_classes: of a classifier, 0 for a language model.
    """
    import torch
    from transformers import Qwen3ForCausalLM, Qwen3ForSequenceClassification

    config = make_config(shape)
    kind = Qwen3ForCausalLM
    if num_classes:
        config.num_labels, kind = num_classes, Qwen3ForSequenceClassification
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    with torch.device(device()):
        model = kind._from_config(config, attn_implementation=attention)
    torch.set_default_dtype(torch.float32)
    model.config.use_cache = False
    return model


def device() -> str:
    """Return ``cuda`` where there is a card."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
