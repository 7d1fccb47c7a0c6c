"""Put LoRA adapters on a model, after checking that every named target exists."""

from __future__ import annotations

import difflib
from typing import Any

import torch

from lm_tuning.errors import UserError
from lm_tuning.models.tuned import without_peft_warning


def target_names(model: Any) -> list[str]:
    """Return the distinct last names of the model's linear layers, such as ``q_proj``, without the output head."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return sorted(
        {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not head
        }
    )


def check_targets(model: Any, targets: str | list[str]) -> None:
    """Refuse adapter targets that match no linear layer.

    Raises:
        UserError: naming each unmatched target, the nearest name and all names there are.
    """
    if targets == "all-linear":
        return
    layers = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    available = target_names(model)
    problems = []
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in layers):
            near = difflib.get_close_matches(target, available, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            problems.append(
                f"train.lora.target_modules: the model has no linear layer named {target!r}{hint}; "
                f"it has {', '.join(available)}, or use 'all-linear'."
            )
    if problems:
        raise UserError(problems)


def add_lora(model: Any, *, r: int, alpha: int, dropout: float, target_modules: str | list[str]) -> Any:
    """Freeze a model and put trainable low-rank adapters on it.

    Args:
        model: a causal language model.
        r: rank of the adapters.
        alpha: the update is scaled by ``alpha / r``.
        dropout: share of adapter inputs zeroed while training.
        target_modules: ``all-linear`` (every linear layer but the head) or names of linear layers.

    Returns:
        The wrapped model; adapters are float32 whatever the frozen weights are.

    Source:
        Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
    """
    from peft import LoraConfig, TaskType, get_peft_model

    check_targets(model, target_modules)
    config = LoraConfig(
        r=r,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=target_modules,
        task_type=TaskType.CAUSAL_LM,
    )
    with without_peft_warning():
        return get_peft_model(model, config)


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """Return (trainable, all) parameters."""
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return trainable, sum(parameter.numel() for parameter in model.parameters())
