"""Add LoRA adapters to a model, after checking that every named target exists, and store them as plain ones."""

from __future__ import annotations

import copy
import difflib
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lm_tuning.errors import UserError
from lm_tuning.models.quantization import quantized_bits
from lm_tuning.models.structure import HEAD
from lm_tuning.models.tuned import without_peft_warning
from lm_tuning.parameters.train import LoraParameters

logger = logging.getLogger(__name__)

ADAPTER = "default"
"""Peft's name of the only adapter."""
TASK_TYPES = {"causal_lm": "CAUSAL_LM", "sequence_classification": "SEQ_CLS", "seq2seq_lm": "SEQ_2_SEQ_LM"}
# They decompose each weight, so the rank cannot be larger than its smaller side.
DECOMPOSING = ("pissa", "olora", "mica")
# They also take what the adapter starts with out of the frozen weight.
MUTATING = ("pissa", "olora")


def target_names(model: Any) -> list[str]:
    """Return the distinct last names of the model's linear layers, such as ``q_proj``, without the output head."""
    return sorted({name.rpartition(".")[2] for name in _targeted_layers(model, "all-linear")})


def check_targets(model: Any, targets: str | list[str]) -> None:
    """Refuse adapter targets that match no linear layer, and the head of a classifier, which is trained in full.

    Raises:
        UserError: naming each unmatched target, the nearest name and all names there are; or a head that is tied to the
            embedding.
    """
    if targets == "all-linear":
        return
    layers = linear_layers(model)
    available = target_names(model)
    head = output_head(model)
    is_tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    problems = []
    for target in targets:
        matches = [module for name, module in layers.items() if is_targeted(name, [target])]
        if not matches:
            near = difflib.get_close_matches(target, available, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            problems.append(
                f"train.lora.target_modules: the model has no linear layer named {target!r}{hint}; "
                f"it has {', '.join(available)}, or use 'all-linear'."
            )
        elif any(module is getattr(model, HEAD, None) for module in matches):
            problems.append(
                f"train.lora.target_modules: {target!r} is the classification head, which is trained in full beside "
                f"the adapter; leave it out. The other layers are {', '.join(available)}."
            )
        elif is_tied and any(module is head for module in matches):
            problems.append(
                f"train.lora.target_modules: {target!r} shares its weights with the embedding of this model "
                "(tie_word_embeddings), so the adapter would train the head alone, and merging it would change the "
                f"embedding too: leave it out, or set train.method = full. The other layers are {', '.join(available)}."
            )
    if problems:
        raise UserError(problems)


def add_lora(model: Any, lora: LoraParameters, *, task: str = "causal_lm") -> Any:
    """Freeze a model and put trainable low-rank adapters on it.

    Args:
        model: a model of the task, quantized or not.
        lora: group ``train.lora``; ``all-linear`` means every linear layer but the head.
        task: what the model is for. A classifier's head is trained in full, and saved with the adapter.

    Returns:
        The wrapped model; what is trained is float32 whatever the frozen weights are.

    Raises:
        UserError: a target is no layer of the model, the rank does not go with the start or the layers, or the kind of
            adapter not with the weights.

    Source:
        Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021; Liu et al., "DoRA", 2024; Kalajdzievski,
        "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", 2023; Meng et al., "PiSSA", 2024; Büyükakyüz,
        "OLoRA", 2024; Dettmers et al., "QLoRA", 2023.
    """
    from peft import LoraConfig, TaskType, get_peft_model
    from transformers.pytorch_utils import Conv1D

    check_targets(model, lora.target_modules)
    if lora.use_dora and model.device.type == "cpu" and quantized_bits(model) == 8:
        # Peft reads the weights for DoRA through a move that loses their scales there.
        raise UserError(
            "train.lora.use_dora = true cannot train beside weights of train.qlora.bits = 8 on a CPU: set "
            "train.qlora.bits = 4, or train.lora.use_dora = false."
        )
    targeted = _targeted_layers(model, lora.target_modules)
    if lora.init.startswith(DECOMPOSING):
        _check_rank(targeted, lora)
    # Peft's prepare_model_for_kbit_training is left out for quantized weights: it turns all that is not quantized into
    # float32, embedding and head included, gigabytes for a large vocabulary. Nothing is gained, since those weights are
    # frozen and norms compute in float32 anyway, and gradients of embeddings are asked for by the reentrant kind of
    # checkpointing alone.
    start: Any = True if lora.init == "default" else lora.init
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        use_dora=lora.use_dora,
        use_rslora=lora.use_rslora,
        init_lora_weights=start,
        # GPT-2 keeps its weights the other way round, inputs first; peft would find out by itself, with a warning.
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in targeted.values()),
        task_type=TaskType[TASK_TYPES[task]],
    )
    with without_peft_warning():
        wrapped: Any = get_peft_model(model, config)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if lora.init.startswith(MUTATING):
        wrapped.lm_tuning_first_adapter = _adapter_matrices(wrapped)
    return wrapped


def save_adapter(model: Any, folder: Path) -> None:
    """Write an adapter that goes onto the unchanged base model, whatever it started from.

    PiSSA and OLoRA train ``W - s B0 A0`` with ``s B A`` beside it. Stored is the change against ``W``, ``B A - B0 A0``,
    as one adapter of twice the rank: ``[B, -B0] [A; A0]``. With a base in float32 that gives the logits of the training
    exactly; a base in 16 bits was rounded once more when ``B0 A0`` was taken out of it, and gives them but for that.
    The others leave the base alone, and are stored as plain adapters, so that loading repeats no decomposition.

    Args:
        model: what :func:`add_lora` returned, trained.
        folder: where to; it is made.
    """
    from safetensors.torch import load_file, save_file

    # The vocabulary is never resized here, so the embedding need not go into an adapter.
    model.save_pretrained(str(folder), save_embedding_layers=False)
    config = copy.deepcopy(model.peft_config[ADAPTER])
    if config.init_lora_weights is True:
        return
    config.init_lora_weights, config.inference_mode = True, True
    first = getattr(model, "lm_tuning_first_adapter", None)
    if first is not None:
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        for name, matrix in first.items():
            if ".lora_A." in name:
                tensors[name] = torch.cat([tensors[name], matrix])
            else:
                tensors[name] = torch.cat([tensors[name], -matrix], dim=1)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
        config.r *= 2
        config.lora_alpha *= math.sqrt(2) if config.use_rslora else 2
    config.save_pretrained(str(folder))


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """Return (trainable, all) parameters."""
    trainable = total = 0
    for parameter in model.parameters():
        size = count_weights(parameter)
        total += size
        trainable += size if parameter.requires_grad else 0
    return trainable, total


def count_weights(parameter: torch.Tensor) -> int:
    """Return the number of weights in a parameter; two of 4 bits lie in one byte."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else math.prod(state.shape)


def stored_parameters(model: Any) -> list[torch.nn.Parameter]:
    """Return the parameters that are stored of a model: all of them, or with adapters what is trained."""
    is_adapter = hasattr(model, "peft_config")
    return [parameter for parameter in model.parameters() if parameter.requires_grad or not is_adapter]


def linear_layers(model: Any) -> dict[str, torch.nn.Module]:
    """Return the layers that an adapter can go on, by name; GPT-2 has its own kind."""
    from transformers.pytorch_utils import Conv1D

    kinds = (torch.nn.Linear, Conv1D)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def is_targeted(name: str, targets: str | list[str]) -> bool:
    """Return whether a linear layer has a name that is asked for."""
    return targets == "all-linear" or any(name == target or name.endswith(f".{target}") for target in targets)


def output_head(model: Any) -> Any:
    """Return the layer that makes logits over the vocabulary; ``None`` without one."""
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def _targeted_layers(model: Any, targets: str | list[str]) -> dict[str, torch.nn.Module]:
    """Return the layers that get an adapter, by name."""
    heads = (output_head(model), getattr(model, HEAD, None))
    return {
        name: module
        for name, module in linear_layers(model).items()
        if module not in heads and is_targeted(name, targets)
    }


def _check_rank(targeted: Mapping[str, torch.nn.Module], lora: LoraParameters) -> None:
    """Refuse a rank that is larger than a target's smaller side: a weight has no more singular values."""
    for name, module in targeted.items():
        assert isinstance(module.weight, torch.Tensor)  # (outputs, inputs), or the other way round in GPT-2
        smaller = min(module.weight.shape)
        if lora.r > smaller:
            raise UserError(
                f"train.lora.r = {lora.r} is more than the {smaller} singular values of {name}, which "
                f"train.lora.init = {lora.init} starts from: set train.lora.r to {smaller} at most, or train.lora.init "
                "= default."
            )


def _adapter_matrices(model: Any) -> dict[str, torch.Tensor]:
    """Copy the two matrices of each adapted layer, under the names that they are stored by."""
    from peft import get_peft_model_state_dict

    stored = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {
        name: tensor.detach().cpu().clone()
        for name, tensor in stored.items()
        if ".lora_A." in name or ".lora_B." in name
    }
