"""What a training is told: the parameters that were set, and what was settled for this run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lm_tuning.batching.step_plan import StepPlan, plan_steps
from lm_tuning.data.split.records import DividedSource
from lm_tuning.models.record import BaseModelRecord, RenderingRecord
from lm_tuning.parameters.base import TaskName
from lm_tuning.parameters.generation import GenerationParameters
from lm_tuning.parameters.train import TrainParameters
from lm_tuning.text.store.table import TokenTable


@dataclass(frozen=True)
class TrainingPaths:
    """Where a training reads and writes.

    Attributes:
        tokens: folder with ``train.arrow`` and ``validation.arrow`` of token columns.
        checkpoints: folder under which every run gets a folder of its own.
        plans: folder of batch plans, shared by all runs; ``None`` keeps them beside the checkpoints.
    """

    tokens: Path
    checkpoints: Path
    plans: Path | None = None


@dataclass(frozen=True)
class TrainingSettings:
    """What a training is told; it can be pickled, so that it can be sent to another process.

    What a user sets travels whole and under its own names. Beside it stands what was settled for this run, and what is
    only stored with its results: ``rendering``, ``generation`` and ``run_id``.

    Attributes:
        train: the group ``train``. Its ``precision`` is settled below, its ``micro_batch_tokens`` and
            ``gradient_checkpointing`` in a :class:`lm_tuning.training.planning.plan.BatchPlan`.
        base: what the base model is, with the digests that results are keyed by.
        tokens_key: key of the token set.
        weights_dtype: type of the base weights: ``float32``, ``bfloat16`` or ``float16``.
        compute_dtype: type of the forward pass (autocast where it differs from the weights).
        device: ``cpu`` or ``cuda``.
        seed: order of rows, adapter initialisation and dropout.
        sources: the training sources in the order that the token table counts them; empty for rows that all come up
            once per epoch.
        task: ``causal_lm``, ``sequence_classification`` or ``seq2seq_lm``.
        label_map: id of each class by its name, kept with the tuned model; ``None`` without classes.
        rendering: how the rows were written, kept with the tuned model, so that it is asked in the same way.
        attention: ``auto``, ``sdpa``, ``eager`` or ``flash_attention_2``.
        generation: how the tuned model is evaluated; stored with it.
        run_id: tracking run to write into checkpoints; ``None`` without tracking.
    """

    train: TrainParameters
    base: BaseModelRecord
    tokens_key: str
    weights_dtype: str
    compute_dtype: str
    device: str
    seed: int
    sources: list[DividedSource] = field(default_factory=list)
    task: TaskName = "causal_lm"
    label_map: dict[str, int] | None = None
    rendering: RenderingRecord = field(default_factory=RenderingRecord)
    attention: str = "auto"
    generation: GenerationParameters = field(default_factory=GenerationParameters)
    run_id: str | None = None


def step_plan_of(settings: TrainingSettings, rows: TokenTable) -> StepPlan:
    """Lay out the steps of a training.

    Args:
        settings: of the training.
        rows: the training rows.

    Raises:
        UserError: there are no rows, or the run has no end or no effective batch.
    """
    return plan_steps(rows, sources=settings.sources, seed=settings.seed, train=settings.train)
