"""Choose how rows go through a model without gradients: packed where a kernel keeps them apart, else padded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lm_tuning.batching import packed_attention
from lm_tuning.batching.micro_batches import Batching
from lm_tuning.batching.tasks.base import Packing, TrainingTask
from lm_tuning.evaluation.settings import EvaluationSettings
from lm_tuning.runtime.precision import autocast
from lm_tuning.text.store.table import TokenTable


@contextmanager
def forward_passes(
    task: TrainingTask, model: Any, table: TokenTable, settings: EvaluationSettings
) -> Iterator[Batching]:
    """Let the model attend as the chosen batches want it, in the compute dtype.

    Args:
        task: how rows become tensors; it is told how they are packed.
        model: on its device, wrapped or not.
        table: the rows.
        settings: device and dtypes.

    Yields:
        ``packed`` or ``padded``.
    """
    with autocast(settings.device, settings.compute_dtype):
        packs = task.can_pack and packed_attention.runs_in_kernel(
            model,
            device=settings.device,
            dtype=getattr(torch, settings.compute_dtype),
            longest_row_tokens=int(table.lengths.max(initial=0)),
        )
    with ExitStack() as stack:
        stack.enter_context(autocast(settings.device, settings.compute_dtype))
        if packs:
            task.packing = Packing(by_bounds=True)
            stack.enter_context(packed_attention.attending_to_packed(model))
        yield "packed" if packs else "padded"
