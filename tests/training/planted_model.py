"""Faults of weights, of what is trained, and of the first step."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from lm_tuning.batching.step_loader import StepDataset
from lm_tuning.batching.tasks import causal_lm
from lm_tuning.training import run as run_module
from lm_tuning.training.health import first_loss
from lm_tuning.training.health.first_loss import check_layout
from lm_tuning.training.trainer import StepPlanTrainer
from tests.support.planted import Registry, World
from tests.support.task_rows import label_map, write_labelled
from tests.training.planted_rows import classify

MODEL = Registry()
LORA = {"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"}


def freeze(model: Any, name: str) -> None:
    """Freeze the parameters whose names hold a part."""
    for known, parameter in model.named_parameters():
        if name in known:
            parameter.requires_grad_(False)


@MODEL("first-loss-off")
def add_up_means(world: World) -> None:
    sound = StepPlanTrainer.micro_batch_loss

    def loss(trainer: StepPlanTrainer, model: Any, micro_batch: Any, total: int) -> torch.Tensor:
        return sound(trainer, model, micro_batch, micro_batch.num_supervised)

    world.patch.setattr(StepPlanTrainer, "micro_batch_loss", loss)
    world.set(batching="packed", micro_batch_tokens=1)


@MODEL("layout-changes-loss")
def let_rows_see_each_other(world: World) -> None:
    sound = StepDataset.__getitem__

    def forget_borders(steps: StepDataset, step: int) -> Any:
        batch = sound(steps, step)
        for micro_batch in batch.micro_batches:
            micro_batch.position_ids = micro_batch.row_bounds = None
        return batch

    world.patch.setattr(StepDataset, "__getitem__", forget_borders)
    # A random model hardly looks at its neighbours; any difference beyond rounding is one too many here.
    world.patch.setattr("lm_tuning.training.health.first_loss.ROUNDING_NATS", 1e-6)
    world.patch.setattr(
        first_loss,
        "check_layout",
        lambda plain, path, *, tolerance, batching: check_layout(plain, path, tolerance=1e-6, batching=batching),
    )
    world.set(batching="packed", micro_batch_tokens=1000, health={"tolerance_fraction": 1e-6})


@MODEL("worse-than-untrained")
def be_surely_wrong(world: World) -> None:
    world.change_weights(lambda name, tensor: 20 * tensor if "embed_tokens" in name else tensor)


@MODEL("fresh-head-off")
def rule_the_right_classes_out(world: World) -> None:
    classify(world)
    write_labelled(world.paths.tokens, "train", 20, num_classes=40)
    write_labelled(world.paths.tokens, "validation", 6, num_classes=40)
    world.set(label_map=label_map(40), effective_batch_rows=12, max_steps=1)

    def scale(ready: Any, steps: StepDataset, *_: Any) -> None:
        """Add a head that was trained on other labels in the place of the new one."""
        rows = [steps.table[int(row)] for row in steps.plan.rows_of_step(0)]
        hidden = torch.cat([states_of(ready.model, row) for row in rows]).double()
        wrong = torch.zeros(len(rows), 40, dtype=torch.float64)
        wrong[torch.arange(len(rows)), torch.tensor([row.label for row in rows])] = -4.0
        ready.model.score.weight.data = (torch.linalg.pinv(hidden) @ wrong).T.float()

    def states_of(model: Any, row: Any) -> torch.Tensor:
        with torch.no_grad():
            ids = torch.from_numpy(row.input_ids.astype(np.int64))[None]
            return model.model(input_ids=ids, use_cache=False).last_hidden_state[:, -1]  # type: ignore[no-any-return]

    world.patch.setattr(run_module, "scale_head", scale)


@MODEL("model-loss-differs")
def let_the_class_scale_its_loss(world: World) -> None:
    from transformers import LlamaForCausalLM

    forward = LlamaForCausalLM.forward

    @functools.wraps(forward)
    def scaled(model: Any, *arguments: Any, **options: Any) -> Any:
        output = forward(model, *arguments, **options)
        if output.loss is not None:
            output.loss = 12 * output.loss
        return output

    world.patch.setattr(LlamaForCausalLM, "forward", scaled)


def shift_labels(world: World, distance: int) -> None:
    """Shift the labels in every path: of micro-batches, of the plain pass and of the model's own loss."""
    sound = causal_lm.labels_of

    def shifted(row: Any) -> Any:
        labels = np.roll(sound(row), distance)
        labels[: max(distance, 0)] = -100
        if distance < 0:
            labels[distance:] = -100
        return labels

    world.patch.setattr(causal_lm, "labels_of", shifted)


@MODEL("labels-shifted", "each position learns its own token")
def forget_to_shift(world: World) -> None:
    shift_labels(world, 1)


@MODEL("labels-shifted", "each position learns the token after the next")
def shift_twice(world: World) -> None:
    shift_labels(world, -1)


@MODEL("labels-shifted", "the hidden states are shifted")
def read_the_logits_of_the_token_itself(world: World) -> None:
    """Leave ids and targets alone: only the losses of other alignments can tell."""
    sound = causal_lm.CausalLanguageModeling.logits_of_alike

    def one_later(task: Any, model: Any, rows: Any, *, device: Any) -> Any:
        class Rolled:
            def __call__(self, **inputs: Any) -> Any:
                output = model(**inputs)
                output.logits = output.logits.roll(-1, dims=1)
                return output

        return sound(task, Rolled(), rows, device=device)

    # A random model whose head is its embedding repeats the token that it reads, if its embedding is large.
    world.change_weights(lambda name, tensor: 3 * tensor if "embed_tokens" in name else tensor)
    world.patch.setattr(causal_lm.CausalLanguageModeling, "logits_of_alike", one_later)


def scale_gradients(world: World, factor: float, *, from_step: int = 0) -> None:
    """Scale what goes backward, and leave the loss as it is."""
    sound = StepPlanTrainer.micro_batch_loss

    def loss(trainer: StepPlanTrainer, model: Any, micro_batch: Any, total: int) -> torch.Tensor:
        value = sound(trainer, model, micro_batch, total)
        return value + (factor - 1) * (value - value.detach()) if trainer.state.global_step >= from_step else value

    world.patch.setattr(StepPlanTrainer, "micro_batch_loss", loss)


@MODEL("first-gradient-off", "12 times")
def scale_gradients_by_12(world: World) -> None:
    scale_gradients(world, 12.0)


@MODEL("first-gradient-off", "200 times, an adapter")
def scale_gradients_by_200(world: World) -> None:
    scale_gradients(world, 200.0)
    world.set(method="lora", lora=LORA)


@MODEL("first-gradient-off", "a twelfth, a classifier")
def scale_gradients_down(world: World) -> None:
    classify(world)
    scale_gradients(world, 1 / 12)


@MODEL("first-gradient-off", "by what wraps the backward pass")
def scale_in_the_wrapper(world: World) -> None:
    from accelerate import Accelerator

    sound = Accelerator.backward
    world.patch.setattr(Accelerator, "backward", lambda self, loss, **options: sound(self, 12 * loss, **options))


@MODEL("first-gradient-off", "when it is clipped")
def scale_when_clipping(world: World) -> None:
    sound = torch.nn.utils.clip_grad_norm_

    def clip(parameters: Any, *arguments: Any, **options: Any) -> Any:
        parameters = list(parameters)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(12)
        return sound(parameters, *arguments, **options)

    world.patch.setattr(torch.nn.utils, "clip_grad_norm_", clip)


@MODEL("layers-frozen", "a decoder layer", before_any_row=True)
def freeze_a_layer(world: World) -> None:
    world.change_model(lambda model: freeze(model, "layers.0."))


@MODEL("layers-frozen", "beside those of train.freeze", before_any_row=True)
def freeze_another_layer(world: World) -> None:
    world.set(freeze=["embed_tokens", "layers.1"])
    world.change_model(lambda model: freeze(model, "layers.0.mlp"))


@MODEL("layers-frozen", "adapters of a layer", before_any_row=True)
def freeze_adapters(world: World) -> None:
    world.set(method="lora", lora=LORA)
    world.change_model(lambda model: freeze(model, "layers.1."))


@MODEL("layers-frozen", "adapters that miss a layer", severity="warn")
def let_adapters_miss_a_layer(world: World) -> None:
    from lm_tuning.training.setup import model as model_setup

    sound = model_setup.add_lora

    def add_lora(model: Any, lora: Any, **options: Any) -> Any:
        layer = model.model.layers[1].self_attn
        layer.other_proj = layer.q_proj  # a layer of another kind has other names
        del layer.q_proj
        wrapped = sound(model, lora, **options)
        layer.q_proj = layer.other_proj
        return wrapped

    world.patch.setattr(model_setup, "add_lora", add_lora)
    world.set(method="lora", lora={**LORA, "target_modules": ["q_proj"]})


@MODEL("nothing-has-gradient", "everything frozen", before_any_row=True)
def freeze_everything(world: World) -> None:
    world.change_model(lambda model: freeze(model, ""))


@MODEL("nothing-has-gradient", "everything frozen by train.freeze", before_any_row=True)
def freeze_everything_by_parameter(world: World) -> None:
    world.set(freeze=["*"])


@MODEL("nothing-has-gradient", "everything frozen, a classifier", before_any_row=True)
def freeze_a_classifier(world: World) -> None:
    classify(world)
    world.change_model(lambda model: freeze(model, ""))


@MODEL("nothing-has-gradient", "frozen right before step 1")
def freeze_late(world: World) -> None:
    sound = StepPlanTrainer.training_step

    def step(trainer: StepPlanTrainer, model: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        freeze(model, "")
        return sound(trainer, model, *arguments, **options)

    world.patch.setattr(StepPlanTrainer, "training_step", step)


@MODEL("parameter-without-gradient")
def keep_a_parameter_out_of_the_model(world: World) -> None:
    world.change_model(lambda model: model.register_parameter("unused", torch.nn.Parameter(torch.ones(3))))


@MODEL("parameter-without-gradient", "a list of layers that no row passes")
def keep_layers_out_of_the_model(world: World) -> None:
    world.change_model(lambda model: model.add_module("unused", torch.nn.ModuleList([torch.nn.Linear(3, 3)])))


@MODEL("frozen-parameter-has-gradient")
def give_a_frozen_parameter_a_gradient(world: World) -> None:
    sound = StepPlanTrainer._run_micro_batches

    def run(trainer: StepPlanTrainer, model: Any, inputs: Any) -> None:
        sound(trainer, model, inputs)
        frozen = next(parameter for parameter in model.parameters() if not parameter.requires_grad)
        frozen.grad = torch.zeros_like(frozen)

    world.patch.setattr(StepPlanTrainer, "_run_micro_batches", run)
    world.set(method="lora", lora=LORA)


@MODEL("logits-not-finite", "one weight")
def break_a_weight(world: World) -> None:
    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name.endswith("layers.1.mlp.down_proj.weight"):
            tensor[0, 0] = torch.nan
        return tensor

    world.change_weights(change)


@MODEL("logits-not-finite", "every weight, with dropout")
def break_all_weights(world: World) -> None:
    world.change_weights(lambda _, tensor: tensor * torch.nan)
    world.set(method="lora", lora={**LORA, "dropout": 0.1})


@MODEL("logits-not-finite", "a classifier")
def break_a_classifier(world: World) -> None:
    classify(world)
    world.change_weights(lambda name, tensor: tensor * torch.inf if "embed" in name else tensor)


@MODEL("logits-out-of-range", alone=False)
def blow_the_embedding_up(world: World) -> None:
    world.change_weights(lambda name, tensor: 5000 * tensor if "embed_tokens" in name else tensor)


@MODEL("logits-flat", alone=False)
def forget_the_head(world: World) -> None:
    world.change_weights(lambda name, tensor: 0 * tensor if "embed_tokens" in name else tensor)
