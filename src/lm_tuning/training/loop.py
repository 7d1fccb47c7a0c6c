"""What the loop around the optimizer steps is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_tuning.batching.losses import LossShape
from lm_tuning.training.checkpoints import format as checkpoints
from lm_tuning.training.health.first_loss import FirstLossDue
from lm_tuning.training.health.report import Finding
from lm_tuning.training.kernels.compiled_layers import CompiledLayers
from lm_tuning.training.planning.compiled import SecondLook
from lm_tuning.training.planning.out_of_memory import MemoryUse
from lm_tuning.training.planning.replanning import Replanner


@dataclass
class LoopSettings:
    """What the loop around the optimizer steps does.

    Attributes:
        run_folder: where this run's checkpoints go.
        identity: what a resume compares.
        run_id: tracking run written into checkpoints; ``None`` without tracking.
        shape: label smoothing and class weights.
        save_every_steps: optimizer steps between checkpoints; ``None`` writes one only when interrupted.
        keep_checkpoints: how many of this run's checkpoints stay.
        eval_every_steps: optimizer steps between evaluations; ``None`` for none.
        evaluate: measures figures on held-out rows, by name; ``None`` without such rows.
        best_metric: name of the figure that the best checkpoint has the best of.
        protect_best: keep the best checkpoint.
        early_stopping_evals: evaluations without a better one after which training ends; ``None`` for never.
        replanner: cuts the steps smaller when memory runs out.
        layers: decoder layers to compile at the first step; ``None`` for none.
        second_look: tries larger micro-batches once they are compiled; ``None`` keeps their size.
        first_loss: what step 1 must log; ``None`` skips the check.
        memory: kept up to date, so that running out of memory can be explained.
        check_trained: looks before the first step whether all that should be trained is.
        on_checkpoint: called when a checkpoint is complete, so that what was logged so far can be made safe too.
    """

    run_folder: Path
    identity: checkpoints.RunIdentity
    run_id: str | None
    shape: LossShape
    save_every_steps: int | None
    keep_checkpoints: int
    eval_every_steps: int | None
    evaluate: Callable[[], dict[str, float]] | None
    best_metric: str
    protect_best: bool
    early_stopping_evals: int | None
    first_loss: FirstLossDue | None
    memory: MemoryUse
    replanner: Replanner
    layers: CompiledLayers | None = None
    second_look: SecondLook | None = None
    check_trained: Callable[[Any], list[Finding]] = lambda model: []
    on_checkpoint: Callable[[], object] = lambda: None
