"""The Hugging Face Trainer, told which rows form a step and what a step's loss is.

One item of the loader is one optimizer step, so the Trainer always sees ``gradient_accumulation_steps=1``;
the loop over micro-batches, the division by the step's token count, logging, evaluation and checkpoints are
ours. What stays the Trainer's: optimizer, scheduler, precision, clipping, device placement and resuming.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_callback import PrinterCallback

from lm_tuning.batching.batch import StepBatch
from lm_tuning.batching.step_loader import StepDataset, StepLoader
from lm_tuning.errors import Interrupted
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.runtime.memory_errors import is_out_of_memory
from lm_tuning.runtime.precision import autocast
from lm_tuning.training.checkpoints import format as checkpoints
from lm_tuning.training.checkpoints.saving import BestCheckpoint, KeepsCheckpoints
from lm_tuning.training.checkpoints.signals import StopRequest
from lm_tuning.training.health.first_gradient import check_gradients, check_logged_norm, norm_of
from lm_tuning.training.health.monitors import check_planned_rates
from lm_tuning.training.health.nonfinite import GuardsUpdates
from lm_tuning.training.health.pre_checks import check_trained_parts
from lm_tuning.training.health.records import Finding
from lm_tuning.training.health.report import HealthReport, stop_if_needed
from lm_tuning.training.job import LoopSettings, choose_workers
from lm_tuning.training.planning.replanning import release
from lm_tuning.training.replayed_steps import ReplaysSteps
from lm_tuning.training.step_log import StepLog
from lm_tuning.wording import count_of

logger = logging.getLogger(__name__)

_LOG_LINES = 10


class StepPlanTrainer(KeepsCheckpoints, ReplaysSteps, GuardsUpdates, Trainer):
    """Train by the step plan."""

    def __init__(
        self,
        *,
        steps: StepDataset,
        loop: LoopSettings,
        log: StepLog,
        health: HealthReport,
        stop: StopRequest,
        on_progress: OnProgress = ignore_progress,
        **trainer_arguments: Any,
    ) -> None:
        """Set the loop up.

        Args:
            steps: one item an optimizer step.
            loop: checkpoints, evaluation and checks.
            log: collects the numbers of each step.
            health: collects facts and findings.
            stop: a signal's request to stop.
            on_progress: receives the steps done.
            **trainer_arguments: ``model``, ``args`` and the like, for the Trainer. It gets no tokenizer, since it would
                overwrite the special tokens of the model's configuration with it.
        """
        # Several visible GPUs would make the Trainer wrap the model in DataParallel.
        trainer_arguments["args"]._n_gpu = min(trainer_arguments["args"].n_gpu, 1)
        super().__init__(train_dataset=steps, **trainer_arguments)
        # It prints every dict of numbers to the terminal, into the progress display.
        self.remove_callback(PrinterCallback)
        self.steps = steps
        self.loop = loop
        self.step_log = log
        self.health = health
        self.stop = stop
        self.num_loader_workers = choose_workers(loop.job.settings)
        self.on_progress = on_progress
        self.best = BestCheckpoint(loop.best_metric)
        self.start_step = 0
        self._loader: StepLoader | None = None
        self._batch: StepBatch | None = None
        self._step_loss: torch.Tensor | None = None
        self._first_norm: float | None = None
        self._recorded_step = 0

    def get_train_dataloader(self) -> Any:
        """Return the loader of steps, beginning where the run begins."""
        self._loader = StepLoader(
            self.steps, self.start_step, self.num_loader_workers, pin_memory=self.args.device.type == "cuda"
        )
        return self._loader

    def close_loader(self) -> None:
        """End the worker processes of the loader, if there are any."""
        if self._loader is not None:
            self._loader.close()

    def get_batch_samples(
        self, epoch_iterator: Iterator[StepBatch], num_batches: int, device: torch.device
    ) -> tuple[list[StepBatch], None]:
        """Fetch the next step, and note how long that took."""
        # The Trainer's own method counts labels for its division; a step brings its count along.
        before = time.perf_counter()
        batch = next(epoch_iterator, None)
        self.step_log.waited(time.perf_counter() - before)
        # An empty list ends the epoch.
        return ([] if batch is None else [batch]), None

    def training_step(  # type: ignore[override]
        self, model: torch.nn.Module, inputs: StepBatch, num_items_in_batch: object = None
    ) -> torch.Tensor:
        """Run forward and backward over the step's micro-batches.

        Each micro-batch contributes its summed nats divided by the token count of the whole step, so how the
        step is split does not change its gradient.

        Args:
            model: the model as wrapped for training.
            inputs: the step.
            num_items_in_batch: the Trainer's own count, not used.

        Returns:
            Nats per supervised token of the step (per row for a classifier), a scalar on the device.
        """
        # Before a step begins: a request to stop ends the evaluation at once, and the next resume makes up for it.
        self.make_up_for_evaluation()
        self.stop.begin_steps()
        # Whatever evaluates puts the mode of each module back; going through thousands of them takes time.
        if self._batch is None or not model.training:
            model.train()
        if self.state.global_step == 0:
            self._add_or_stop(check_trained_parts(self.accelerator.unwrap_model(model), self.loop.job.settings))
        if self._batch is None and self.loop.fp8 is not None:
            # Before layers are compiled, so that they are compiled as they will run.
            self.step_log.paused(self.loop.begin_fp8(model, inputs, self.steps.task, self.health))
        if self._batch is None and self.loop.layers is not None:
            self._compile(model, inputs)
        inputs = self.loop.replanner.split_again(inputs)
        while not self._run_step(model, inputs):
            release(model)
            inputs = self.steps[inputs.step]
        assert self._step_loss is not None
        if self.state.global_step == 0:
            self._add_or_stop(check_gradients(self.accelerator.unwrap_model(model)))
            if self.loop.first_loss is not None:
                self.loop.first_loss.check(self.health, model, inputs, float(self._step_loss))
                self.loop.first_loss.check_gradient(self.health, inputs, scale=self._gradient_scale())
                trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
                self._first_norm = norm_of(trained) / self._gradient_scale()
            self.health.facts["first_look_seconds"] = self.health.seconds
        return self._step_loss

    def _add_or_stop(self, findings: list[Finding]) -> None:
        """Add findings that are not there yet, and end the run if one asks for it."""
        self.health.add_new(findings)
        if findings:
            stop_if_needed(self.health)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Return the gradient norm; that of the first step is compared with its gradients, before any update."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if self._first_norm is not None:
            finding = check_logged_norm(self._first_norm, float(norm))
            self._first_norm = None
            self._add_or_stop([] if finding is None else [finding])
        return norm

    def _gradient_scale(self) -> float:
        """Return by what float16's scaler multiplies gradients until they are clipped."""
        scaler = self.accelerator.scaler
        return float(scaler.get_scale()) if scaler is not None else 1.0

    def _run_step(self, model: torch.nn.Module, inputs: StepBatch) -> bool:
        """Run forward and backward; return whether the step fitted into memory."""
        graphs = self.loop.graphs
        try:
            # Step 1 of a process has no graph: the checks of it see plain passes, and libraries prepare themselves.
            if graphs is None or self._batch is None:
                self._run_micro_batches(model, inputs)
            else:
                self._run_with_graphs(graphs, model, inputs)
        except RuntimeError as error:
            # The memory of the graphs is the first to be given back, before micro-batches become smaller.
            if graphs is not None and is_out_of_memory(error) and graphs.turn_off("no more, since memory ran out"):
                return False
            if not self.loop.replanner.lower(error):
                raise
            return False
        return True

    def _run_micro_batches(self, model: torch.nn.Module, inputs: StepBatch) -> None:
        total = inputs.num_supervised
        # Stays on the device: reading it would make the host wait for every micro-batch.
        nats = torch.zeros((), device=self.args.device)
        last = len(inputs.micro_batches) - 1
        self.loop.memory.begin_step(inputs.step + 1)
        phases = self.step_log.phases
        for index, micro_batch in enumerate(inputs.micro_batches):
            self.stop.acknowledge()
            phases.enter("forward")
            self.loop.memory.begin_micro_batch(micro_batch)
            micro_batch = micro_batch.to(self.args.device)  # noqa: PLW2901 - the host copy is not needed any more
            # Processes exchange gradients once a step, with its last micro-batch.
            with self.accelerator.no_sync(model) if index < last else nullcontext():
                loss = self.micro_batch_loss(model, micro_batch, total)
                phases.enter("backward")
                self.accelerator.backward(loss)
            nats += loss.detach() * total
        phases.enter("optimizer")
        self.loop.memory.end_step()
        self._batch, self._step_loss = inputs, nats / total

    def _compile(self, model: torch.nn.Module, inputs: StepBatch) -> None:
        """Compile the decoder layers on the step's first micro-batch; its gradients are thrown away."""
        assert self.loop.layers is not None
        micro_batch = inputs.micro_batches[0].to(self.args.device)

        def run() -> None:
            with self.accelerator.no_sync(model):
                self.accelerator.backward(self.micro_batch_loss(model, micro_batch, inputs.num_supervised))

        began = time.perf_counter()
        self.loop.layers.compile_with(run, self.health.facts)
        # Compiling ran a backward pass, of which the first step must see nothing.
        model.zero_grad(set_to_none=True)
        if self.loop.compiled_planner is not None and "compile_failure" not in self.health.facts:
            self.loop.compiled_planner.take(optimizer_is_made=bool(self.optimizer.state))
        self.step_log.paused(time.perf_counter() - began)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the schedule, and look at the rates that it will give before the first step is made with them."""
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        check_planned_rates(self.health, scheduler, total_steps=len(self.steps), peak=self.args.learning_rate)
        return scheduler

    def micro_batch_loss(self, model: torch.nn.Module, micro_batch: Any, total: int | torch.Tensor) -> torch.Tensor:
        """Return the micro-batch's share of the step's loss: summed nats over the step's token count."""
        # The Trainer wraps the model's own forward pass for this, and a task may run a part of the model instead.
        compute = "bfloat16" if self.args.bf16 else "float16" if self.args.fp16 else "float32"
        with autocast(self.args.device.type, compute):
            return self.steps.task.sum_nats(model, micro_batch, self.loop.job.shape) / total

    def floating_point_ops(self, inputs: Any) -> int:
        """Leave the Trainer's estimate out; it is made for other batches."""
        return 0

    def _maybe_log_save_evaluate(  # noqa: PLR0917
        self,
        tr_loss: torch.Tensor,
        grad_norm: torch.Tensor | float | None,
        model: torch.nn.Module,
        trial: Any,
        epoch: float,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None:
        """Log the step, and evaluate, save and stop when it is time to."""
        step = self.state.global_step
        if step == self._recorded_step:
            return  # the Trainer calls again at the end of an epoch
        self._recorded_step = step
        assert self._batch is not None
        assert self._step_loss is not None
        self.state.epoch = self.steps.plan.epoch_at(step)
        rate = learning_rate if learning_rate is not None else self._get_learning_rate()
        self.step_log.record(
            self._batch, epoch=self.state.epoch, loss=self._step_loss, gradient_norm=grad_norm, learning_rate=rate
        )
        self._report_progress(step)
        self._check_movement(step, rate)
        self._evaluate_and_save(step)
        if self.stop.signal_name is not None and step < len(self.steps):
            self._stop(step)

    def _check_movement(self, step: int, rate: float) -> None:
        """Once per run, measure the loss of the first rows again."""
        movement = self.loop.first_loss.movement if self.loop.first_loss is not None else None
        if movement is None or not movement.count(rate, is_last=step == len(self.steps)):
            return
        # What the device still has to do for the step is the step's own time, not that of the check.
        self.step_log.flush()
        began = time.perf_counter()
        with self.loop.plain_passes():
            # Not the wrapped one, since unwrapping looks for compiled layers in every module.
            movement.check(self.health, self.model)
        seconds = time.perf_counter() - began
        self.health.seconds += seconds
        self.step_log.paused(seconds)
        stop_if_needed(self.health)

    def _report_progress(self, step: int) -> None:
        """Write the line of the step before, whose figures have arrived; at the end that of this one too."""
        total = len(self.steps)
        if step % max(total // _LOG_LINES, 1) == 0:
            self._log_last_step(total)
        if step == total:
            self._log_this_step()
        self.on_progress("Training", step, total, "steps")

    def _log_last_step(self, total: int) -> None:
        if self.step_log.steps and self.step_log.steps[-1]["step"] > self.start_step:  # none from before a resume
            logger.info("%s", self.step_log.describe_last(total))

    def _log_this_step(self) -> None:
        """Wait for the figures of the step that is the last one, and write its line."""
        self.step_log.flush()
        self._log_last_step(len(self.steps))

    def _evaluate_and_save(self, step: int) -> None:
        last = step == len(self.steps)
        every = self.loop.eval_every_steps
        if every is not None and (last or step % every == 0):
            self._evaluate_unless_stopped(step)
            if not last and not self.owes_evaluation and self.is_stopped_early():
                last = self.control.should_training_stop = True
                self._log_this_step()
        if self._saves_at(step, last=last):
            began = time.perf_counter()
            self.write_checkpoint()
            self.step_log.paused(time.perf_counter() - began)

    def _evaluate_unless_stopped(self, step: int) -> None:
        """Evaluate; a request to stop breaks that off, since a resume makes up for it."""
        self.owes_evaluation = True
        try:
            with self.stop.breaking_off():
                self.run_evaluation(step)
        except Interrupted:
            if self.stop.is_final:
                raise
            logger.info("The evaluation of step %d is left to a resume.", step)
        else:
            self.owes_evaluation = False

    def make_up_for_evaluation(self) -> None:
        """Evaluate the step of a checkpoint, which a request to stop has kept from it."""
        if self.owes_evaluation and self.loop.evaluate is not None:
            self.run_evaluation(self.start_step)
        self.owes_evaluation = False

    def is_stopped_early(self) -> bool:
        """Return whether the held-out figure has been without a better one for too long, and log it when it has."""
        patience = self.loop.train.early_stopping_evals
        if patience is None or self.best.value is None:
            return False
        steps = [row["step"] for row in self.step_log.evaluations]
        if sum(1 for step in steps if step > self.best.step) < patience:
            return False
        logger.info(
            "Training ends at step %d of %d: %s in a row without a better %s than %.4f of step %d.",
            steps[-1],
            len(self.steps),
            count_of(patience, "evaluation"),
            self.best.metric,
            self.best.value,
            self.best.step,
        )
        return True

    def run_evaluation(self, step: int) -> dict[str, float]:
        """Measure the held-out figures now and note them."""
        assert self.loop.evaluate is not None
        began = time.perf_counter()
        figures = self.loop.evaluate()
        seconds = time.perf_counter() - began
        self.step_log.record_evaluation(step, self.steps.plan.epoch_at(step), figures, seconds)
        self.step_log.paused(seconds)
        logger.info("step %d  held-out %s", step, ", ".join(f"{name} {value:.4f}" for name, value in figures.items()))
        # Only what is kept can be gone back to; without that, every evaluation counts.
        counts = not self.loop.train.load_best or self._saves_at(step, last=step == len(self.steps))
        if counts and self.best.is_beaten_by(figures[self.best.metric]):
            self.best = BestCheckpoint(self.best.metric, figures[self.best.metric], step)
        return figures

    def _stop(self, step: int) -> None:
        self._log_this_step()
        newest = checkpoints.list_complete(self.loop.run_folder)
        written = newest[-1] if newest and newest[-1].step == step else self.write_checkpoint()
        assert self.stop.signal_name is not None
        raise Interrupted(
            self.stop.signal_name,
            f"Step {step} of {len(self.steps)} was finished and kept in {written.path}; "
            "go on with the same command and train.resume=true among its --params.",
        )
