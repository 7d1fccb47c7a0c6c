"""The nearest known key to one that does not exist, and what to use instead of another program's key."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

from lm_tuning.parameters.schema import walk_keys
from lm_tuning.parameters.trainer import OWNED_BY_US

# Habits of other trainers that no spelling distance would find.
_HABITS = {
    "lr": "train.learning_rate",
    "epochs": "train.num_epochs",
    "steps": "train.max_steps",
    "batch": "train.effective_batch_rows",
    "batch_size": "train.effective_batch_rows",
    "micro_batch_size": "train.micro_batch_tokens",
    "max_length": "tokenize.max_length_tokens",
    "max_seq_length": "tokenize.max_length_tokens",
    "cutoff_len": "tokenize.max_length_tokens",
    "truncation_side": "tokenize.cut_prompt_at",
    "chat_template_kwargs": "tokenize.template_arguments",
    "enable_thinking": "tokenize.template_arguments",
    "packing": "train.batching",
    "rank": "train.lora.r",
    "lora_r": "train.lora.r",
    "lora_alpha": "train.lora.alpha",
    "lora_dropout": "train.lora.dropout",
    "lora_target": "train.lora.target_modules",
    "lora_target_modules": "train.lora.target_modules",
    "init_lora_weights": "train.lora.init",
    "finetuning_type": "train.method",
    "quantization_bit": "train.qlora.bits",
    "patience": "train.early_stopping_evals",
    "bf16": "train.precision",
    "fp16": "train.precision",
    "model_name": "model.name_or_path",
    "model_name_or_path": "model.name_or_path",
    "experiment_name": "tracking.experiment",
    "threads": "environment.num_threads",
    "val_size": "split.validation",
    "test_size": "split.test",
}
_CLOSE_ENOUGH = 0.7
# A near miss in the same group is likelier than an equally near one elsewhere.
_SAME_GROUP_BONUS = 0.1


def suggest(path: Sequence[str]) -> str:
    """Say what a user most likely meant by an unknown key.

    Args:
        path: the unknown key, part by part, such as ``("train", "max_length_tokens")``.

    Returns:
        A sentence that starts with a space, or nothing when no known key comes near.
    """
    path = tuple(path)
    name = path[-1]
    if path[0] == "train" and name in OWNED_BY_US:
        return f" {as_sentence(OWNED_BY_US[name])}"
    if name in _HABITS:
        return f" Did you mean {_HABITS[name]}?"
    best = max(walk_keys(), key=lambda item: _likeness(path, item[0]))[0]
    return f" Did you mean {'.'.join(best)}?" if _likeness(path, best) >= _CLOSE_ENOUGH else ""


def as_sentence(advice: str) -> str:
    """Turn a piece of advice into a sentence."""
    return f"{advice[0].upper()}{advice[1:]}."


def _likeness(path: tuple[str, ...], known: tuple[str, ...]) -> float:
    """Compare the last parts by spelling, and prefer the same group."""
    matcher = SequenceMatcher(None, path[-1].lower(), known[-1])
    return matcher.ratio() + _SAME_GROUP_BONUS * (path[:-1] == known[:-1])
