"""Check, before the first node, what a training asks of the device and of its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedro.framework.hooks import hook_impl

from lm_tuning.errors import UserError
from lm_tuning.runtime.device import Device, probe_device

if TYPE_CHECKING:
    from kedro.io import CatalogProtocol
    from kedro.pipeline import Pipeline

    from lm_tuning.parameters import ModelParameters, TrainParameters

TRAINING_NODES = {"train_model", "profile_steps"}


class TrainingStartHook:
    """Stop a training that cannot run here before rows are split and tokenized for it."""

    @hook_impl
    def before_pipeline_run(self, pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Hold the parameters against the device, without torch, and look for the checkpoint to go on from.

        The train node checks the same again by what torch says. Pipelines that train nothing are left alone: rows may
        be tokenized on another machine than the one that trains.

        Raises:
            UserError: with every problem at once.
        """
        from lm_tuning.parameters.model import ModelParameters
        from lm_tuning.parameters.train import TrainParameters
        from lm_tuning.training.checkpoints.format import require_latest

        nodes = {node.func.__name__ for node in pipeline.nodes} & TRAINING_NODES
        if not nodes or not {"params:train", "params:model"} <= pipeline.inputs():
            return
        # Not through the catalog, which would log each as loaded, nor by loading the folder, which would make it.
        entries: dict[str, Any] = {name: catalog.get(name) for name in ("params:train", "params:model", "checkpoints")}
        train = TrainParameters.model_validate(entries["params:train"].load())
        model = ModelParameters.model_validate(entries["params:model"].load())
        problems = find_device_problems(probe_device(), train, model)
        if train.resume and "train_model" in nodes and (folder := getattr(entries["checkpoints"], "_filepath", None)):
            # Whether the checkpoint fits is only known with the tokens.
            try:
                require_latest(Path(folder))
            except UserError as error:
                problems += error.problems
        if problems:
            raise UserError(problems)


def find_device_problems(device: Device, train: TrainParameters, model: ModelParameters) -> list[str]:
    """Say what a device cannot do of what is asked.

    Args:
        device: as far as it is known without torch.
        train: group ``train``.
        model: group ``model``.
    """
    from lm_tuning.runtime.precision import choose_precision

    problems = []
    if device.kind != "cuda" or device.detail != "compute capability unknown":
        try:
            choose_precision(device, requested=train.precision, method=train.method, weights_dtype=model.dtype)
        except UserError as error:
            problems += error.problems
    if device.kind == "cpu" and train.method == "qlora" and train.qlora.bits == 8 and train.lora.use_dora:
        problems.append(
            "train.lora.use_dora = true cannot train beside weights of train.qlora.bits = 8 on a CPU: set "
            "train.qlora.bits = 4, or train.lora.use_dora = false."
        )
    return problems
