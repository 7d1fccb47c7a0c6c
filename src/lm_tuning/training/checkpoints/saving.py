"""Write the checkpoints of a training as it goes on, know the best of them, and go on from one."""

from __future__ import annotations

import json
import logging
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from lm_tuning.models.hub import transformers_bars_off
from lm_tuning.training.checkpoints import format as checkpoints
from lm_tuning.training.checkpoints.format import BestRecord
from lm_tuning.training.checkpoints.resume import RestoresState
from lm_tuning.training.health.report import HealthReport
from lm_tuning.training.setup.adapters import stored_parameters

if TYPE_CHECKING:
    from lm_tuning.batching.step_loader import StepDataset
    from lm_tuning.training.job import LoopSettings
    from lm_tuning.training.records import StoredStepLog
    from lm_tuning.training.step_log import StepLog


# Every figure that a checkpoint can be the best by, and which way is better.
HIGHER_IS_BETTER = {"nats_per_token": False, "nats_per_row": False, "accuracy": True, "macro_f1": True}


@dataclass
class BestCheckpoint:
    """The best held-out figure seen so far.

    Attributes:
        metric: which figure.
        value: the best one; ``None`` before the first evaluation.
        step: optimizer step that it was measured after.
    """

    metric: str
    value: float | None = None
    step: int = 0

    def to_json(self) -> BestRecord | None:
        """Return what a checkpoint keeps of it; ``None`` before the first evaluation."""
        return None if self.value is None else {"metric": self.metric, "value": self.value, "step": self.step}

    def is_beaten_by(self, value: float) -> bool:
        """Return whether another figure is better; one that is not a number never is."""
        if math.isnan(value):
            return False
        if self.value is None:
            return True
        return value > self.value if HIGHER_IS_BETTER[self.metric] else value < self.value


logger = logging.getLogger(__name__)


class KeepsCheckpoints(RestoresState):
    """Checkpoints of a transformers Trainer that are whole or not there; stands before ``Trainer`` among the bases.

    Attributes:
        steps: of the run.
        loop: where checkpoints go and how many stay.
        step_log: numbers of the steps so far, which go with a checkpoint.
        health: findings so far, likewise.
        best: the best evaluation so far.
        start_step: optimizer steps done before this process.
        seconds_before: that training took before this process, until the checkpoint.
        total_seconds_before: the same with loading and checks.
        run_began: when the training of this process began, loading and checks included; by ``time.perf_counter``.
        began: when this process began to train, by ``time.perf_counter``.
        owes_evaluation: a request to stop broke the evaluation of the present step off.
    """

    steps: StepDataset
    loop: LoopSettings
    step_log: StepLog
    health: HealthReport
    best: BestCheckpoint
    start_step: int
    seconds_before: float = 0.0
    total_seconds_before: float = 0.0
    run_began: float = 0.0
    began: float = 0.0
    owes_evaluation: bool = False
    state: Any
    save_model: Any
    _recorded_step: int
    _save_optimizer_and_scheduler: Any
    _save_scaler: Any
    _save_rng_state: Any

    def continue_from(self, checkpoint: checkpoints.Checkpoint) -> None:
        """Restore the log and the best figure of a checkpoint; ``train`` then starts at its step."""
        # Before anything of this run is changed.
        self.check_trainer_state(checkpoint.path)
        self.start_step = self._recorded_step = checkpoint.step
        facts = checkpoint.facts
        self.health.go_on_from(facts.get("health"), step=checkpoint.step, seconds=facts.get("health_seconds", 0.0))
        self.owes_evaluation = facts.get("owes_evaluation", False)
        self.seconds_before = facts.get("training_seconds", 0.0)
        # Checkpoints of earlier versions do not have the whole time.
        self.total_seconds_before = facts.get("total_seconds", self.seconds_before)
        before = facts.get("total_steps")
        # It is allowed: a longer run goes on from a shorter one's end.
        if before != len(self.steps):
            logger.warning(
                "The run was laid out for %s steps and now has %d: the learning rate follows the schedule of %d steps "
                "from here on.",
                before,
                len(self.steps),
                len(self.steps),
            )
        log = checkpoints.read_json_object(checkpoint.path / checkpoints.STEP_LOG)
        self.step_log.restore(cast("StoredStepLog", log), num_steps=checkpoint.step)
        best = facts.get("best")
        if best is None or best["metric"] != self.best.metric:
            self.best = self._find_best()
        elif self.loop.train.load_best and best["step"] not in self._list_kept_steps():
            self.best = self._find_best()
            found = f"step {self.best.step} is the best of the others" if self.best.step else "no other has a figure"
            logger.warning("The checkpoint of step %d, the best so far, is not kept: %s.", best["step"], found)
        else:
            self.best = BestCheckpoint(best["metric"], best["value"], best["step"])

    def _list_kept_steps(self) -> set[int]:
        return {each.step for each in checkpoints.list_complete(self.loop.run_folder)}

    def _find_best(self) -> BestCheckpoint:
        """Look for the best figure among the evaluations before a resume, for a run that was led by another one."""
        best = BestCheckpoint(self.best.metric)
        kept = self._list_kept_steps()
        for row in self.step_log.evaluations:
            value, step = row.get(f"validation_{best.metric}"), row["step"]
            if value is None or (self.loop.train.load_best and step not in kept):
                continue  # not measured then, or its weights are gone
            if best.is_beaten_by(value):
                best = BestCheckpoint(best.metric, value, int(step))
        return best

    def _saves_at(self, step: int, *, last: bool) -> bool:
        every = self.loop.train.save_every_steps
        return every is not None and step > 0 and (last or step % every == 0)

    def write_checkpoint(self) -> checkpoints.Checkpoint:
        """Write everything a resume needs, aside, and rename it when it is whole.

        Raises:
            UserError: the disk is full, or takes no files for another reason; earlier checkpoints are kept.
        """
        step = self.state.global_step
        with checkpoints.writing_checkpoint(
            self.loop.run_folder, step, estimated_bytes=self._estimate_checkpoint_bytes
        ) as staging:
            # transformers shows a bar of its own for every file of weights.
            with transformers_bars_off():
                self.save_model(str(staging), _internal_call=True)
            self._save_optimizer_and_scheduler(str(staging))
            self._save_scaler(str(staging))
            self._save_rng_state(str(staging))
            self.state.save_to_json(str(staging / "trainer_state.json"))
            # This waits for the figures of the step, which are on their way from the device.
            (staging / checkpoints.STEP_LOG).write_text(json.dumps(self.step_log.to_json()))
            written = checkpoints.publish_checkpoint(
                staging,
                self.loop.run_folder,
                step=step,
                identity=self.loop.job.identity,
                run_id=self.loop.job.settings.run_id,
                progress={
                    "total_steps": len(self.steps),
                    "best": self.best.to_json(),
                    "health": self.health.to_json(),
                    "training_seconds": self.seconds_before + time.perf_counter() - self.began,
                    "total_seconds": self.total_seconds_before + time.perf_counter() - self.run_began,
                    "health_seconds": self.health.seconds,
                    "freeze": self.loop.train.freeze,
                    **({"owes_evaluation": True} if self.owes_evaluation else {}),
                },
            )
        # The best so far may be older than all that are kept.
        protected = self.loop.run_folder / f"checkpoint-{self.best.step}" if self.loop.train.load_best else None
        checkpoints.prune(self.loop.run_folder, keep=self.loop.train.keep_checkpoints, protect=protected)
        self.loop.on_checkpoint()
        logger.info("Checkpoint of step %d written to %s", step, written.path)
        return written

    def _estimate_checkpoint_bytes(self) -> int:
        """Return the size of the weights that are saved and of the optimizer's state, in bytes."""
        stored = stored_parameters(self.accelerator.unwrap_model(self.model))
        # Before the first step there is no state yet, and the estimate is too low by it.
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        return sum(tensor.nbytes for tensor in [*stored, *state] if isinstance(tensor, torch.Tensor))
