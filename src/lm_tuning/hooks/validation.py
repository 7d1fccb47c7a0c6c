"""Check before the first node what a pipeline starts from, and what a training asks for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedro.framework.hooks import hook_impl

from lm_tuning.datasets.entry import CatalogEntry, find_way
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
        """Check the parameters against the device, without torch, and look for the checkpoint to go on from.

        The train node checks the same again by what torch says. Pipelines that train nothing are left alone: rows may
        be tokenized on another machine than the one that trains.

        Raises:
            UserError: with every problem at once.
        """
        from lm_tuning.training.checkpoints.integrity import require_latest

        nodes = {node.func.__name__ for node in pipeline.nodes} & TRAINING_NODES
        if not nodes or not {"params:train", "params:model"} <= pipeline.inputs():
            return
        # Not by catalog.load(), which would log each of them as loaded.
        entries: list[Any] = [catalog.get(name) for name in ("params:train", "params:model")]
        train, model = (entry.load() for entry in entries)  # Kedro has made the classes of them, by the nodes' hints
        problems = find_device_problems(probe_device(), train, model)
        # The path alone: loading the entry would make the folder, and a run that is refused leaves none.
        folder = getattr(catalog.get("checkpoints"), "_filepath", None)
        if train.resume and "train_model" in nodes and folder:
            # Whether it is whole is seen now; whether it fits is only known with the tokens.
            try:
                require_latest(Path(folder))
            except UserError as error:
                problems += error.problems
        if problems:
            raise UserError(problems)


def find_device_problems(device: Device, train: TrainParameters, model: ModelParameters) -> list[str]:
    """Describe what a device cannot do of what is asked.

    Args:
        device: as far as it is known without torch.
        train: group ``train``.
        model: group ``model``.
    """
    from lm_tuning.runtime.precision import choose_precision

    problems = []
    # Without the capability of a card nothing is refused here: the train node asks torch.
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


class StoredInputsHook:
    """Tell datasets their names, and stop a run whose inputs are missing."""

    @hook_impl
    def after_catalog_created(self, catalog: CatalogProtocol) -> None:
        """Tell each dataset of ours which entry it is, for its messages."""
        for name, dataset in catalog.items():
            if isinstance(dataset, CatalogEntry):
                dataset.entry_name = name

    @hook_impl(tryfirst=True)
    def before_pipeline_run(self, pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Look for every input that no node of this run makes.

        Raises:
            UserError: naming each missing entry, its path and the pipelines that lead there from what is stored.
        """

        def is_missing(name: str) -> bool:
            dataset = catalog.get(name)
            return isinstance(dataset, CatalogEntry) and not dataset.exists()  # type: ignore[attr-defined]

        missing = sorted(filter(is_missing, pipeline.inputs()))
        if not missing:
            return
        way = find_way(missing, is_missing=is_missing)
        problems = []
        for name in missing:
            dataset = catalog.get(name)
            assert isinstance(dataset, CatalogEntry)
            problems.append(dataset.describe_missing(Path(getattr(dataset, "_filepath", name)), way=way))
        raise UserError(problems)
