"""What ``train.fp8`` needs beside it."""

from __future__ import annotations

from collections.abc import Iterator

from lm_tuning.parameters.train import TrainParameters


def find_fp8_problems(train: TrainParameters, task: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Find settings that products in 8 bits do not go with.

    Args:
        train: the ``train`` parameters.
        task: the ``task`` parameter.

    Yields:
        The keys that take part, and the sentence for the user.
    """
    if not train.fp8:
        return
    key, off = "train.fp8", "or train.fp8 = false"
    if train.method != "lora":
        why = "trains all weights" if train.method == "full" else "holds the frozen weights in fewer bits already"
        yield (
            (key, "train.method"),
            f"{key} = true quantizes frozen weights beside an adapter, and train.method = {train.method} {why}: set "
            f"train.method = lora, {off}.",
        )
    elif train.lora.use_dora:
        yield (
            (key, "train.lora.use_dora"),
            f"{key} = true goes without the frozen weights in 16 bits, whose sizes train.lora.use_dora = true reads: "
            f"set train.lora.use_dora = false, {off}.",
        )
    if train.precision in ("float32", "float16"):
        yield (
            (key, "train.precision"),
            f"{key} = true goes with arithmetic in bfloat16, but train.precision = {train.precision}: set "
            f"train.precision = auto or bfloat16, {off}.",
        )
    if task == "seq2seq_lm":
        yield (
            (key, "task"),
            f"{key} = true is for models of one list of decoder layers, but task = seq2seq_lm has encoder and decoder: "
            f"set {key} = false.",
        )
