"""Merge an adapter into its base, one layer at a time, and write the weights in the dtype that is asked for.

Each weight is made float32 for its own merge and rounded once, so that the model is held in memory once, in the dtype
of its files, and one weight of it in float32.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_tuning.errors import UserError
from lm_tuning.export.records import ExportDtype
from lm_tuning.models.hub import transformers_bars_off
from lm_tuning.models.structure import has_encoder

SHARD_SIZE = "1GB"
"""Of a file of weights: about so much is held a second time while it is written."""


@dataclass(frozen=True)
class Merged:
    """A model without adapters.

    Attributes:
        model: the base, with the adapter in its weights.
        num_layers: merged ones.
        is_untied: whether head and embedding, which the base shares, became two matrices.
    """

    model: Any
    num_layers: int
    is_untied: bool


def check_mergeable(config: Any) -> None:
    """Refuse kinds of adapters that have no place in the weights of a base.

    Args:
        config: of PEFT.

    Raises:
        UserError: the adapter is no LoRA, or has parts that cannot be merged.
    """
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    why = None
    if kind != "LORA":
        why = f"it is of the kind {kind}, and only LORA is merged here"
    elif getattr(config, "lora_bias", False):
        why = "it has biases (lora_bias), for which layers without a bias have no place"
    elif getattr(config, "trainable_token_indices", None):
        why = "it trains single tokens (trainable_token_indices)"
    if why is not None:
        raise UserError(f"The adapter cannot be merged: {why}. Set export.format = adapter.")


def merge_layers(wrapped: Any, dtype: ExportDtype) -> Merged:
    """Add an adapter to the weights of its base, one layer after the other.

    A weight that two modules share, of which the adapter changes one, becomes two: the other one has to stay as it was.

    Args:
        wrapped: a PEFT model on a CPU or GPU, not quantized; it is taken apart.
        dtype: of the merged weights.

    Raises:
        UserError: the adapter cannot be merged, or its numbers do not fit into the dtype.
    """
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer

    check_mergeable(wrapped.peft_config["default"])
    target = getattr(torch, dtype)
    uses = Counter(id(parameter) for _, parameter in wrapped.named_parameters(remove_duplicate=False))
    layers = [(name, module) for name, module in wrapped.named_modules() if isinstance(module, BaseTunerLayer)]
    shared = [name for name, module in layers if uses[id(module.get_base_layer().weight)] > 1]
    if shared and has_encoder(wrapped.config):
        raise UserError(
            f"The adapter cannot be merged: it changes {shared[0]}, whose weights encoder, decoder and head share. Set "
            "export.format = adapter."
        )
    for name, module in layers:
        layer: Any = module.get_base_layer()
        if name in shared:
            layer.weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
        # In 16 bits the sum would be rounded more than once: with DoRA three times.
        layer.weight.data = layer.weight.data.float()
        module.merge(safe_merge=False)
        layer.weight.data = _cast(layer.weight.data, target, name)
    model = wrapped.unload()
    return Merged(model, len(layers), _settle_tying(model))


def _settle_tying(model: Any) -> bool:
    """Write into the config whether head and embedding are one matrix still; return whether they became two."""
    import torch

    if not hasattr(model, "get_output_embeddings") or has_encoder(model.config):
        return False
    configs = {id(config): config for config in (model.config, model.config.get_text_config())}.values()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or not any(getattr(config, "tie_word_embeddings", False) for config in configs):
        return False
    if head.weight is embedding.weight:
        return False
    if torch.equal(head.weight, embedding.weight):
        head.weight = embedding.weight
        return False
    for config in configs:
        config.tie_word_embeddings = False
    return True


def write_weights(model: Any, folder: Path, dtype: ExportDtype) -> None:
    """Write config and weights, each weight in the dtype.

    Args:
        model: without adapters; its weights are cast in place.
        folder: where to.
        dtype: of the weights.

    Raises:
        UserError: a number does not fit into the dtype.
    """
    import torch

    target = getattr(torch, dtype)
    # One by one: a second copy of the whole model would take as much memory again.
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            parameter.data = _cast(parameter.data, target, name)
    for buffer_name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            owner, _, name = buffer_name.rpartition(".")
            module = model.get_submodule(owner)
            if name not in module._non_persistent_buffers_set:
                module._buffers[name] = buffer.to(target)
    model.config.use_cache = True
    with transformers_bars_off():
        model.save_pretrained(folder, max_shard_size=SHARD_SIZE)


def _cast(weight: Any, target: Any, name: str) -> Any:
    """Round a weight to a dtype that can hold it."""
    import torch

    cast = weight.to(target)
    # float16 ends at 65,504, which some models trained in bfloat16 pass.
    if target is torch.float16 and not torch.isfinite(cast).all() and torch.isfinite(weight).all():
        raise UserError(
            f"export.dtype = float16 cannot hold {name}, which has numbers beyond 65,504: set export.dtype = bfloat16 "
            "or float32."
        )
    return cast
