"""What ``mlflow.yml``, the parameters and the environment say about tracking, without asking the tracking store."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from lm_tuning.errors import UserError
from lm_tuning.json_types import JsonObject
from lm_tuning.secrets import mask_address, remember_settings
from lm_tuning.tracking.address import check_address, is_database

if TYPE_CHECKING:
    from kedro.framework.context import KedroContext
    from kedro_mlflow.config.kedro_mlflow_config import KedroMlflowConfig

    from lm_tuning.parameters import TrackingParameters


class ExperimentOfFile(TypedDict, total=False):
    """The experiment as ``mlflow.yml`` states it."""

    name: str
    create_experiment_kwargs: dict[str, str]


class MlflowFile(TypedDict, total=False):
    """What is read here of ``mlflow.yml``; kedro-mlflow's classes check the whole of it, these keys too."""

    server: dict[str, str]
    tracking: dict[str, ExperimentOfFile]


def set_up_mlflow(context: KedroContext, tracking: TrackingParameters) -> KedroMlflowConfig:
    """Do what kedro-mlflow does with its configuration, but for what would wait for the tracking store.

    Args:
        context: of the session; the configuration becomes its attribute ``mlflow``.
        tracking: the parameters that name experiment and run.

    Returns:
        The configuration. With a run that the user has opened, the store is that of this run.

    Raises:
        UserError: ``mlflow.yml`` has unknown keys, values of the wrong type, or names that are parameters; or the
            address is none.
    """
    import mlflow
    from kedro_mlflow.config.kedro_mlflow_config import _validate_uri
    from kedro_mlflow.config.resolvers import resolve_random_name
    from omegaconf import OmegaConf

    logging.getLogger("kedro_mlflow").setLevel(logging.WARNING)  # the import above sets it to INFO
    if not OmegaConf.has_resolver("km.random_name"):
        OmegaConf.register_new_resolver("km.random_name", resolve_random_name, use_cache=True)
    root = Path(context.project_path)
    # Checked before it is completed: what is completed would hide what the user has left out or misspelled.
    given = _read_mlflow_config(context)
    _refuse_second_names(_validate(given), tracking)
    completed = complete_mlflow_config(given, tracking.experiment, root)
    _hide_password(completed["server"]["mlflow_tracking_uri"])
    context.config_loader["mlflow"] = completed
    config = _validate(completed)
    # A run that the user has opened lies in a store already, with credentials and all.
    if mlflow.active_run() is not None:
        config.server.mlflow_tracking_uri = mlflow.get_tracking_uri()
    else:
        config._export_credentials(context)
        config._register_request_header_provider(context)
        server, creation = config.server, config.tracking.experiment.create_experiment_kwargs
        check_address(str(server.mlflow_tracking_uri), _name_source(given))
        server.mlflow_tracking_uri = _validate_uri(root, server.mlflow_tracking_uri)
        if server.mlflow_registry_uri is not None:
            server.mlflow_registry_uri = _validate_uri(root, server.mlflow_registry_uri)
        mlflow.set_tracking_uri(server.mlflow_tracking_uri)
        # As kedro-mlflow's set-up does; the rest of that makes or restores the experiment, and waits for the store.
        mlflow.set_registry_uri(server.mlflow_registry_uri)  # type: ignore[arg-type]  # None: as the tracking store
        if creation.artifact_location is not None:
            creation.artifact_location = _validate_uri(root, creation.artifact_location)
        if config.tracking.disable_tracking.disable_autologging:
            mlflow.autolog(disable=True)
    context.__setattr__("mlflow", config)  # where kedro-mlflow's users look for it
    return config


def _validate(content: MlflowFile) -> KedroMlflowConfig:
    from kedro_mlflow.config.kedro_mlflow_config import KedroMlflowConfig
    from pydantic import ValidationError

    try:
        return KedroMlflowConfig.model_validate(content)
    except ValidationError as error:
        wrong = [(".".join(map(str, item["loc"])), item["msg"]) for item in error.errors()]
        raise UserError([f"mlflow.yml: {key}: {problem}." for key, problem in wrong]) from error


def _without_nulls(content: JsonObject) -> JsonObject:
    """Leave out what is null, such as a group whose keys are all commented out."""
    return {
        key: _without_nulls(value) if isinstance(value, Mapping) else value
        for key, value in content.items()
        if value is not None
    }


def _refuse_second_names(stated: KedroMlflowConfig, tracking: TrackingParameters) -> None:
    """Refuse names in ``mlflow.yml`` that would give way to the parameters without a word."""
    experiment, run = stated.tracking.experiment, stated.tracking.run
    problems = []
    # Only what the file states: kedro-mlflow has a default name of its own.
    if "name" in experiment.model_fields_set and experiment.name != tracking.experiment:
        problems.append(
            f"mlflow.yml: tracking.experiment.name = {experiment.name!r}, but runs go to the experiment of the "
            f"parameter tracking.experiment = {tracking.experiment!r}. Set the parameter, and take the name out of "
            "mlflow.yml."
        )
    if run.name is not None and run.name != tracking.run_name:
        problems.append(
            f"mlflow.yml: tracking.run.name = {run.name!r} would not be used: set the parameter tracking.run_name, and "
            "take the name out of mlflow.yml."
        )
    if run.id is not None:
        problems.append(
            f"mlflow.yml: tracking.run.id = {run.id!r} would not be used: to log into an existing run, set the "
            "environment variable MLFLOW_RUN_ID, and take the id out of mlflow.yml."
        )
    if problems:
        raise UserError(problems)


def _hide_password(uri: str) -> None:
    """Keep the password of a tracking server to ourselves."""
    if mask_address(uri) != uri:
        remember_settings(uri)
        # At the end of a run MLflow prints its address, password included.
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")


def _name_source(given: MlflowFile) -> str:
    """Describe where the address of the store was set."""
    is_in_file = bool(given.get("server", {}).get("mlflow_tracking_uri"))
    return "mlflow.yml: server.mlflow_tracking_uri" if is_in_file else "The environment variable MLFLOW_TRACKING_URI"


def _read_mlflow_config(context: KedroContext) -> MlflowFile:
    """Return ``mlflow.yml`` of the environment without what is null, or nothing where there is no such file."""
    from kedro.config import MissingConfigException

    try:
        content: Any = _without_nulls(dict(context.config_loader["mlflow"]))
    except MissingConfigException:
        content = {}
    read: MlflowFile = content
    return read


def complete_mlflow_config(config: MlflowFile, experiment: str, root: Path) -> MlflowFile:
    """Add what ``mlflow.yml`` leaves open.

    Args:
        config: content of ``mlflow.yml``.
        experiment: name of the experiment, which is a parameter.
        root: project folder; without any tracking URI runs go to a database there.

    Returns:
        A configuration for kedro-mlflow. A folder for artifacts within the project is left out when a server keeps the
        runs, since it would mean a folder on the server.
    """
    server, tracking = config.get("server", {}), config.get("tracking", {})
    uri = server.get("mlflow_tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI")
    uri = uri or f"sqlite:///{root / 'mlflow.db'}"
    stated = tracking.get("experiment", {})
    creation = stated.get("create_experiment_kwargs", {}).copy()
    # A path within the project means a folder of this machine, and a server would take it for one of its own.
    if not is_database(uri) and "://" not in str(creation.get("artifact_location") or "://"):
        del creation["artifact_location"]
    named: ExperimentOfFile = {**stated, "name": experiment, "create_experiment_kwargs": creation}
    return {**config, "server": {**server, "mlflow_tracking_uri": uri}, "tracking": {**tracking, "experiment": named}}
