"""Faults that show while training runs."""

from __future__ import annotations

import math
from typing import Any

import torch

from lm_tuning.runtime.nvml import CardReading
from lm_tuning.training import job, step_log
from lm_tuning.training import run as run_module
from lm_tuning.training.health import device_monitors, monitor
from lm_tuning.training.health.monitor import TrainingMonitor
from lm_tuning.training.kernels import fp8
from lm_tuning.training.step_log import StepLog
from lm_tuning.training.trainer import StepPlanTrainer
from tests.support.planted import Registry, World
from tests.training.planted_model import scale_gradients

RUNNING = Registry()
GIB = 2**30


def change_loss(world: World, change: Any) -> None:
    """Change the loss of steps: ``change(step from 1, loss)``."""
    sound = StepPlanTrainer.micro_batch_loss

    def loss(trainer: StepPlanTrainer, model: Any, micro_batch: Any, total: int) -> torch.Tensor:
        return change(trainer.state.global_step + 1, sound(trainer, model, micro_batch, total))  # type: ignore[no-any-return]

    world.patch.setattr(StepPlanTrainer, "micro_batch_loss", loss)


def with_broken_gradient(loss: torch.Tensor) -> torch.Tensor:
    """Return the same loss with a gradient that is NaN."""
    return loss + (0 * loss).sqrt() * 0


@RUNNING("fp8-not-used")
def break_the_kernel_of_8_bits(world: World) -> None:
    def fail(*_: Any) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    world.patch.setattr(fp8, "why_no_device", lambda device: None)
    world.patch.setattr(fp8, "scaled_product", fail)
    lora = {"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"}
    world.set(method="lora", lora=lora, fp8=True, compile=False, weights_dtype="bfloat16", compute_dtype="bfloat16")


@RUNNING("loss-not-finite")
def break_a_loss(world: World) -> None:
    change_loss(world, lambda step, loss: loss * math.nan if step == 3 else loss)


@RUNNING("gradient-not-finite")
def break_a_gradient(world: World) -> None:
    change_loss(world, lambda step, loss: with_broken_gradient(loss) if step == 3 else loss)


@RUNNING("updates-keep-failing", alone=False)
def break_every_step_from_the_second(world: World) -> None:
    world.set(max_steps=14)
    change_loss(world, lambda step, loss: loss * math.nan if step > 1 else loss)


@RUNNING("most-updates-skipped", "3 of 4", alone=False)
def break_three_of_four(world: World) -> None:
    world.set(max_steps=4)
    change_loss(world, lambda step, loss: loss * math.nan if step > 1 else loss)


@RUNNING("most-updates-skipped", "3 of 4 of a long run, gradients alone", alone=False)
def break_three_of_four_for_long(world: World) -> None:
    world.set(max_steps=400)
    change_loss(world, lambda step, loss: with_broken_gradient(loss) if step % 4 else loss)


@RUNNING("fp16-overflows")
def overflow(world: World) -> None:
    world.patch.setattr(monitor, "OVERFLOWS_AT_START", 0)
    world.patch.setattr(
        run_module,
        "TrainingMonitor",
        lambda *arguments, **options: TrainingMonitor(*arguments, **options | {"has_scaler": True}),
    )
    change_loss(world, lambda step, loss: with_broken_gradient(loss) if step in {3, 5} else loss)


@RUNNING("gradients-often-clipped")
def clip_often(world: World) -> None:
    """Two of three gradients far above the limit, the third below it."""
    world.set(max_steps=24, learning_rate=1e-5, trainer={"lr_scheduler_type": "constant", "max_grad_norm": 0.05})
    change_loss(world, lambda step, loss: loss if step % 3 else loss.detach() + 1e-3 * (loss - loss.detach()))


@RUNNING("gradients-far-above-limit")
def clip_at_next_to_nothing(world: World) -> None:
    world.set(max_steps=24, learning_rate=1e-5, trainer={"lr_scheduler_type": "constant", "max_grad_norm": 0.01})


@RUNNING("gradient-exploded")
def explode_late(world: World) -> None:
    world.set(max_steps=23, learning_rate=1e-5, trainer={"lr_scheduler_type": "constant", "max_grad_norm": 100.0})
    scale_gradients(world, 1000.0, from_step=22)


@RUNNING("gradient-zero")
def cut_a_gradient(world: World) -> None:
    change_loss(world, lambda step, loss: loss.detach() + 0 * loss if step == 2 else loss)


def let_schedules_pass(world: World) -> None:
    """Leave out what refuses a warm-up as long as the run, so that only the rates themselves tell."""
    for check in ("check_schedule", "refuse_conflicts"):
        world.patch.setattr(job, check, lambda *_: None)


@RUNNING("no-update-made", "a warm-up of one step")
def end_with_the_warm_up(world: World) -> None:
    let_schedules_pass(world)
    world.set(max_steps=1, trainer={"lr_scheduler_type": "linear", "warmup_steps": 1})


@RUNNING("no-update-made", "every update skipped", alone=False)
def break_every_gradient(world: World) -> None:
    world.set(max_steps=3)
    change_loss(world, lambda step, loss: with_broken_gradient(loss))


@RUNNING("learning-rate-tiny", "1e-12")
def learn_with_next_to_no_rate(world: World) -> None:
    world.set(max_steps=24, learning_rate=1e-12)


@RUNNING("learning-rate-tiny", "a long warm-up")
def begin_a_long_warm_up(world: World) -> None:
    let_schedules_pass(world)
    world.set(trainer={"lr_scheduler_type": "linear", "warmup_steps": 4000})


@RUNNING("loss-does-not-move", "the optimizer does nothing")
def make_no_update(world: World) -> None:
    world.patch.setattr(torch.optim.AdamW, "step", lambda *_, **__: None)
    world.set(max_steps=24)


@RUNNING("loss-does-not-move", "the weights are put back")
def round_updates_away(world: World) -> None:
    """Stand in for weights of 16 bits that a tiny rate does not move."""
    world.set(max_steps=40, learning_rate=1e-8, trainer={"lr_scheduler_type": "linear"})
    sound = torch.optim.AdamW.step

    def step(optimizer: Any, *arguments: Any, **options: Any) -> Any:
        before = [parameter.detach().clone() for group in optimizer.param_groups for parameter in group["params"]]
        result = sound(optimizer, *arguments, **options)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter, value in zip(parameters, before, strict=True):
            parameter.data = value
        return result

    world.patch.setattr(torch.optim.AdamW, "step", step)


@RUNNING("loss-rises")
def climb(world: World) -> None:
    scale_gradients(world, -1.0)
    world.set(max_steps=60)


@RUNNING("warm-up-not-finished")
def end_within_the_warm_up(world: World) -> None:
    let_schedules_pass(world)
    world.set(trainer={"lr_scheduler_type": "linear", "warmup_steps": 20})


@RUNNING("peak-rate-not-reached")
def halve_every_rate(world: World) -> None:
    from transformers import Trainer

    sound = Trainer.create_scheduler

    def halved(trainer: Any, *arguments: Any, **options: Any) -> Any:
        scheduler = sound(trainer, *arguments, **options)
        scheduler.lr_lambdas = [lambda step: 0.5] * len(scheduler.lr_lambdas)
        scheduler.step()
        return scheduler

    world.patch.setattr(Trainer, "create_scheduler", halved)


@RUNNING("loader-starves-device")
def wait_for_every_batch(world: World) -> None:
    sound = StepLog.waited
    world.patch.setattr(StepLog, "waited", lambda log, seconds: sound(log, seconds + 1000.0))
    world.set(max_steps=30)


@RUNNING("memory-ran-out")
def run_out_of_memory_once(world: World) -> None:
    sound = StepPlanTrainer.micro_batch_loss
    seen: list[int] = []

    def loss(trainer: StepPlanTrainer, model: Any, micro_batch: Any, total: int) -> torch.Tensor:
        seen.append(micro_batch.num_positions)
        if len(seen) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")
        return sound(trainer, model, micro_batch, total)

    world.patch.setattr(StepPlanTrainer, "micro_batch_loss", loss)
    world.set(micro_batch_tokens="auto")


def hold(world: World, *, held: int, total: int) -> None:
    """Let the process hold so many bytes of a card that has so many."""
    world.patch.setattr(step_log, "_peak_memory_bytes", lambda on_gpu: held)
    world.patch.setattr(monitor, "card_memory_bytes", lambda device: total)


@RUNNING("memory-near-limit")
def nearly_fill_the_card(world: World) -> None:
    hold(world, held=76 * GIB, total=80 * GIB)


@RUNNING("memory-beyond-card")
def spill_into_the_host(world: World) -> None:
    hold(world, held=90 * GIB, total=80 * GIB)
    world.patch.setattr(device_monitors, "read_card", lambda uuid: CardReading(80 * GIB - 2**20, 80 * GIB))


@RUNNING("throughput-falls")
def slow_down(world: World) -> None:
    sound = StepLog.record

    def record(log: StepLog, batch: Any, **options: Any) -> None:
        log._clock -= 10_000.0 if batch.step >= 40 else 1000.0
        sound(log, batch, **options)

    world.patch.setattr(StepLog, "record", record)
    world.set(max_steps=60)
