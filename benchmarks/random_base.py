"""What benchmarks on random weights say of their base model."""

from __future__ import annotations

from pathlib import Path

from lm_tuning.models.record import BaseModelRecord


def random_base(folder: Path, shape: str = "") -> BaseModelRecord:
    """Return the record of a model with random weights.

    Args:
        folder: of its files.
        shape: of the model, by which plans of one shape are told from those of another.
    """
    return BaseModelRecord(
        name_or_path=str(folder),
        revision=None,
        trust_remote_code=False,
        digest=f"random {shape}".strip(),
        tokenizer_digest="random",
        is_embedded=False,
    )
