"""The loss of a causal language model as a sum of nats, divided once by the step's supervised tokens."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from lm_tuning.text.token_table import IGNORE_INDEX
from lm_tuning.training.batches import MicroBatch


def keeps_logits(model: Any) -> bool:
    """Say whether the model's forward can compute the logits of chosen positions alone."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "logits_to_keep" in inspect.signature(base.forward).parameters


def sum_nats(model: Any, batch: MicroBatch, *, select_logits: bool) -> torch.Tensor:
    """Run the model on a micro-batch and sum the negative log-likelihood of its supervised tokens.

    The model is never given labels, so whatever its class calls a loss (mean, sum, scaled) does not matter.

    Args:
        model: a causal language model, wrapped or not, on the micro-batch's device.
        batch: the rows, ``(batch, sequence)``.
        select_logits: let the head compute only the kept positions; see :func:`keeps_logits`.

    Returns:
        A scalar in nats, float32.
    """
    inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
    if batch.position_ids is not None:
        inputs["position_ids"] = batch.position_ids
    if select_logits:
        inputs["logits_to_keep"] = batch.kept_positions
    logits = model(**inputs).logits
    if not select_logits:
        logits = logits[:, batch.kept_positions]
    return cross_entropy(
        logits.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
