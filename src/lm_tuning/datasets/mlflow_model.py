"""Give MLflow an export as a model: logged into the run, and registered under a name where one is given."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from kedro.io import AbstractDataset, DatasetError

from lm_tuning.datasets.entry import CatalogEntry
from lm_tuning.errors import UserError
from lm_tuning.export.records import NotServed, ServedModel
from lm_tuning.json_types import JsonObject
from lm_tuning.models.generation_settings import GENERATION_NAME

logger = logging.getLogger(__name__)

MODEL_NAME = "exported_model"
_SERVING_CODE = Path(__file__).with_name("serving_code.py")


class MlflowModelDataset(CatalogEntry, AbstractDataset[ServedModel | NotServed, NoReturn]):
    """Log an export as a model of the MLflow run of this ``kedro run``, if the description says that it is wanted.

    Causal models and classifiers go in MLflow's flavour for transformers; encoder-decoders and adapters, which that has
    no pipelines for, with the code of ``serving_code.py``.

    Example:
        .. code-block:: yaml

            served_model:
              type: lm_tuning.datasets.MlflowModelDataset
    """

    def __init__(self, metadata: JsonObject | None = None) -> None:
        """Keep the description for plugins.

        Args:
            metadata: for plugins and our tracking hook.
        """
        self.metadata = metadata

    def load(self) -> NoReturn:
        """Refuse: MLflow loads its models."""
        raise DatasetError("MLflow loads the model: mlflow.pyfunc.load_model('models:/<name>@<alias>').")

    def save(self, data: ServedModel | NotServed) -> None:
        """Log and register the model.

        Raises:
            UserError: MLflow is away, or does not take the model; the export itself is whole.
        """
        if not data["is_wanted"]:
            return
        import mlflow
        from mlflow.exceptions import MlflowException
        from requests.exceptions import RequestException

        kept = f"The export is whole in {data['folder']}"
        if mlflow.active_run() is None:
            raise UserError(
                f"MLflow at {mlflow.get_tracking_uri()} has no run to log the export into: it is away, or mlflow.yml "
                f"disables tracking of this pipeline. {kept}. Run kedro run --pipelines=export again, or set "
                "export.log_to_mlflow = false and export.register_as = null."
            )
        try:
            with _settled():
                uri = _register(data, _log(data))
        except (MlflowException, RequestException, OSError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UserError(f"MLflow did not take the export: {reason}. {kept}. Run it again.") from error
        logger.info("MLflow has the export as %s. Serve it: mlflow models serve -m '%s' --env-manager local", uri, uri)

    def _exists(self) -> bool:
        return False  # each run has its own

    def _describe(self) -> dict[str, str]:
        return {}


@contextmanager
def _settled() -> Iterator[None]:
    """Let MLflow 3.17 log a folder of transformers 5.24, which names the class of a pipeline where it was the class."""
    import transformers
    from transformers import pipelines

    find_task, bars = pipelines.check_task, "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"
    wanted = os.environ.get(bars)

    def find_task_and_class(task: str) -> tuple[str, dict[str, Any], Any]:
        name, found, options = find_task(task)
        if isinstance(found["impl"], str):
            found = {**found, "impl": getattr(transformers, found["impl"].rpartition(".")[2])}
        return name, found, options

    pipelines.check_task = find_task_and_class
    os.environ.setdefault(bars, "false")  # they would be drawn over ours
    try:
        yield
    finally:
        pipelines.check_task = find_task
        if wanted is None:
            os.environ.pop(bars, None)


def _log(data: ServedModel) -> Any:
    """Log the model by its flavour, with signature, example and requirements."""
    import mlflow

    shared: dict[str, Any] = {
        "name": MODEL_NAME,
        "input_example": _example_of(data),
        "pip_requirements": data["requirements"],
        "registered_model_name": data["register_as"],
        "metadata": dict(data["tags"]),
        "tags": data["tags"],
    }
    if data["flavor"] == "python":
        return mlflow.pyfunc.log_model(
            python_model=str(_SERVING_CODE),
            artifacts={"model": data["folder"]},
            model_config=dict(data["settings"]),
            signature=_signature_of(data),
            **shared,
        )
    import mlflow.transformers
    from huggingface_hub import ModelCard

    card = (Path(data["folder"]) / "README.md").read_text(encoding="utf-8")
    return mlflow.transformers.log_model(
        transformers_model=data["folder"],
        task=data["pipeline_task"],
        model_config=_pipeline_options(data),
        # Given, since MLflow would ask the hub for it.
        model_card=ModelCard(card, ignore_metadata_errors=True),
        signature=None if data["pipeline_task"].startswith("llm/") else _signature_of(data),
        **shared,
    )


def _register(data: ServedModel, info: Any) -> str:
    """Give the new version its alias, and say by which address the model is loaded."""
    from mlflow import MlflowClient

    name, alias = data["register_as"], data["alias"]
    if name is None:
        return str(info.model_uri)
    client, number = MlflowClient(), str(info.registered_model_version)
    for key, value in data["tags"].items():
        client.set_model_version_tag(name, number, key, value)
    if alias is None:
        return f"models:/{name}/{number}"
    client.set_registered_model_alias(name, alias, number)
    return f"models:/{name}@{alias}"


def _pipeline_options(data: ServedModel) -> dict[str, Any]:
    """Return what the pipeline is called with, so that it answers as the evaluation did."""
    if data["pipeline_task"] == "text-classification":
        return {}
    settings = data["settings"]
    # Without these a pipeline always draws its answers, and puts a second BOS token before what a template has written.
    options = {
        "max_new_tokens": settings["max_new_tokens"],
        "do_sample": _draws(Path(data["folder"])),
        "add_special_tokens": settings["adds_special_tokens"],
    }
    return options if settings["is_chat"] else {**options, "return_full_text": False}


def _draws(folder: Path) -> bool:
    """Return whether the evaluation drew its answers, as the settings beside the weights say."""
    path = folder / GENERATION_NAME
    return path.is_file() and bool(json.loads(path.read_text(encoding="utf-8")).get("do_sample"))


def _example_of(data: ServedModel) -> Any:
    import pandas as pd

    if data["flavor"] == "python":
        return pd.DataFrame({"text": data["example"]})
    return data["example"]


def _signature_of(data: ServedModel) -> Any:
    """Return what the model takes and gives."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema

    settings, is_plain = data["settings"], data["flavor"] == "transformers"
    inputs = Schema([ColSpec(DataType.string) if is_plain else ColSpec(DataType.string, "text")])
    if settings["labels"]:
        return ModelSignature(inputs, Schema([ColSpec(DataType.string, "label"), ColSpec(DataType.double, "score")]))
    outputs = Schema([ColSpec(DataType.string) if is_plain else ColSpec(DataType.string, "answer")])
    params = ParamSchema([ParamSpec("max_new_tokens", DataType.long, settings["max_new_tokens"])])
    return ModelSignature(inputs, outputs, params)
