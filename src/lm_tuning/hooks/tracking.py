"""Track each ``kedro run`` as one MLflow run: settings, facts, artifacts, and how it ended."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedro.framework.hooks import hook_impl

from lm_tuning.datasets.metric_stream import MetricStream
from lm_tuning.errors import Interrupted, UserError
from lm_tuning.hooks.mlflow_run import MlflowRun
from lm_tuning.hooks.run_description import data_digests, name_pipelines, numbers_of, rerun_command
from lm_tuning.hooks.run_list import offer_view
from lm_tuning.hooks.stopping import StopSignals, was_interrupted
from lm_tuning.models.tuned import read_tuning
from lm_tuning.parameters.loading import load_parameters
from lm_tuning.runtime.facts import environment_facts, run_facts
from lm_tuning.runtime.stopping import stop_if_requested
from lm_tuning.secrets import mask_address, remember_settings
from lm_tuning.storage.locks import one_at_a_time
from lm_tuning.training.checkpoints import find_latest

if TYPE_CHECKING:
    from kedro.framework.context import KedroContext
    from kedro.io import CatalogProtocol
    from kedro.pipeline import Pipeline
    from kedro_mlflow.framework.hooks import MlflowHook
    from mlflow.entities import Run

    from lm_tuning.parameters import Parameters

logger = logging.getLogger(__name__)


class TrackingHook:
    """Take the place of kedro-mlflow's hook, which does the configuration for us and none of the logging.

    It logs each setting of a typed group, where the plugin logs the group as one text; goes on with the run of a
    resumed training; and closes a run as FAILED or KILLED, where the plugin leaves an interrupted one finished or
    running. Once the run is open, trouble with the tracking store is a warning: it never costs a result.
    """

    def __init__(self) -> None:
        """Begin without a run; MLflow is imported with the first session."""
        self._plugin: MlflowHook | None = None
        self._parameters: Parameters | None = None
        self._root = Path()
        self._signals = StopSignals()
        self._catalog: CatalogProtocol | None = None
        self._run: MlflowRun | None = None
        self._is_ours = True
        self._began = 0.0
        self._streams: list[MetricStream] = []
        self._digests: dict[str, str] = {}
        # A resume that is refused must leave the run that it would have continued as it was. So until the training
        # has gone on, what would overwrite something is held back, with the run's earlier end at hand.
        self._held: list[tuple[str, Callable[[], None]]] | None = None
        self._earlier_status = "FINISHED"

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Choose the tracking store and the experiment.

        Raises:
            UserError: if ``mlflow.yml`` has unknown keys or values of the wrong type.
        """
        from kedro_mlflow.framework.hooks import MlflowHook
        from pydantic import ValidationError

        logging.getLogger("kedro_mlflow").setLevel(logging.WARNING)  # the import above sets it to INFO
        self._finish("KILLED")  # a run that Ctrl-C in a notebook has left open: Kedro calls no hook then
        self._root = Path(context.project_path)
        self._parameters = load_parameters(context.config_loader, context.project_path)
        config = complete_mlflow_config(_read_mlflow_config(context), self._parameters.tracking.experiment, self._root)
        _hide_password(config["server"]["mlflow_tracking_uri"])
        context.config_loader["mlflow"] = config
        self._plugin = MlflowHook()
        # Two processes that make the tables of a new database at the same time break each other's.
        with one_at_a_time(self._root / "data" / ".locks" / "mlflow.lock"):
            try:
                self._plugin.after_context_created(context)
            except ValidationError as error:
                wrong = [(".".join(map(str, item["loc"])), item["msg"]) for item in error.errors()]
                raise UserError([f"mlflow.yml: {key}: {problem}." for key, problem in wrong]) from error

    @hook_impl
    def after_catalog_created(  # noqa: PLR0917 - as Kedro declares it
        self,
        catalog: CatalogProtocol,
        conf_catalog: dict[str, Any],
        conf_creds: dict[str, Any],
        parameters: dict[str, Any],
        save_version: str,
        load_versions: dict[str, str],
    ) -> None:
        """Let the plugin name the metric datasets that a user may have added."""
        assert self._plugin is not None, "the context comes before the catalog"
        self._plugin.after_catalog_created(catalog, conf_catalog, conf_creds, parameters, save_version, load_versions)

    @hook_impl(trylast=True)
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Open the run and log what is known before the first node."""
        self._catalog, self._streams, self._digests = catalog, [], {}
        self._began = time.time()
        if not self._is_enabled(run_params):
            return
        self._signals.install()
        atexit.register(self._finish, "KILLED")  # Kedro calls no hook for what is not an Exception
        try:
            self._run = self._open_run(run_params, pipeline, catalog)
            run_id = self._run.run_id
            self._try("settings", self._log_settings)
            self._try("facts", lambda: self._log_start(run_params))
            self._try("the view of its list", lambda: offer_view(run_id))
        except BaseException as error:
            self._finish("KILLED" if was_interrupted(error) else "FAILED")
            raise

    @hook_impl
    def before_node_run(self) -> None:
        """Begin no node after a request to stop that something took for an error of its own.

        Raises:
            Interrupted: a signal had asked to stop.
        """
        stop_if_requested()

    @hook_impl
    def before_dataset_loaded(self, dataset_name: str) -> None:
        """Make the run the active one in other threads of Kedro's runner as well."""
        import mlflow

        if self._run is not None and mlflow.active_run() is None:
            mlflow.start_run(run_id=self._run.run_id)

    @hook_impl
    def after_dataset_loaded(self, dataset_name: str, data: Any) -> None:
        """Remember streams, to close them with the run, and which data the run started from."""
        if isinstance(data, MetricStream):
            self._streams.append(data)
        self._log_digests(dataset_name, data)

    @hook_impl
    def after_dataset_saved(self, dataset_name: str, data: Any) -> None:
        """Copy what the catalog marks as an artifact; log its figures and its digests."""
        if self._run is None or self._catalog is None:
            return
        run, dataset = self._run, self._catalog.get(dataset_name)
        marks = (getattr(dataset, "metadata", None) or {}).get("lm_tuning", {})
        if metrics := marks.get("mlflow_metrics"):
            figures = data if metrics is True else data[metrics]
            split = data.get("split") if isinstance(data, Mapping) else None
            self._soon(
                f"the figures of '{dataset_name}'",
                lambda: run.log_figures(dataset_name, numbers_of(figures), split=split),
            )
        if folder := marks.get("mlflow_artifact"):
            paths = getattr(dataset, "artifact_paths", None) or [Path(getattr(dataset, "_filepath", dataset_name))]
            for path in paths:
                what = f"a copy of '{dataset_name}'" + (f" ({path.name})" if len(paths) > 1 else "")
                self._soon(what, lambda path=path: self._log_artifact(run, path, folder))  # type: ignore[misc]
        self._log_digests(dataset_name, data)
        if dataset_name == "tuned_model":
            self._release()

    @hook_impl(tryfirst=True)
    def after_pipeline_run(self) -> None:
        """Close the run as finished, once every metric is written."""
        self._close_streams()
        self._finish("FINISHED")

    @hook_impl(tryfirst=True)
    def on_pipeline_error(self, error: Exception) -> None:
        """Close the run as failed or killed, and leave the error to Kedro."""
        status = "KILLED" if was_interrupted(error) else "FAILED"
        is_refusal = self._held is not None and _is_refusal(error)
        if self._run is not None:
            run, text = self._run, f"{type(error).__name__}: {error}"
            if is_refusal:
                self._held, status = None, self._earlier_status
                self._try("the refusal", lambda: run.take_resume_back(text))
            else:
                self._try("the error", lambda: run.log_tags({"error": text}))
                self._log_what_is_kept_on_failure(run)
        self._finish(status, with_facts=not is_refusal)

    def _is_enabled(self, run_params: Mapping[str, Any]) -> bool:
        """Respect ``tracking.disable_tracking.pipelines`` of ``mlflow.yml``."""
        assert self._plugin is not None, "the context comes before the pipeline"
        disabled = self._plugin.mlflow_config.tracking.disable_tracking.pipelines
        return not all(name in disabled for name in run_params.get("pipeline_names") or ["__default__"])

    def _open_run(self, run_params: Mapping[str, Any], pipeline: Pipeline, catalog: CatalogProtocol) -> MlflowRun:
        """Start a run, or go on with that of the checkpoint to resume, or log into one that the user has opened."""
        import mlflow

        assert self._plugin is not None and self._parameters is not None, "the context comes before the pipeline"
        active = mlflow.active_run()
        self._is_ours = active is None
        if active is not None:
            return MlflowRun(active.info.run_id)
        resumed = None
        if self._parameters.train.resume and "checkpoints" in pipeline.inputs():
            resumed = _find_resumable_run(catalog.load("checkpoints"))
        if resumed is not None:
            mlflow.set_experiment(experiment_id=resumed.info.experiment_id)
            active = mlflow.start_run(run_id=resumed.info.run_id)
            self._held = []
            # A process that was killed outright has left its run as running.
            ended = resumed.info.status in {"FINISHED", "FAILED", "KILLED"}
            self._earlier_status = resumed.info.status if ended else "KILLED"
        else:
            name = self._parameters.tracking.run_name or f"{name_pipelines(run_params)} {self._parameters.output}"
            active = mlflow.start_run(run_name=name)
        run = MlflowRun(active.info.run_id)
        verb = "Going on with" if run.num_resumes else "Started"
        logger.info("%s MLflow run '%s' (%s).", verb, active.info.run_name, run.run_id)
        return run

    def _log_settings(self) -> None:
        """Log every parameter with its value of now, also those that no file names."""
        assert self._run is not None and self._parameters is not None, "the run is open"
        self._run.log_settings(self._parameters.model_dump(mode="json"))

    def _log_start(self, run_params: Mapping[str, Any]) -> None:
        """Log how the run was started, from which code, and on what machine."""
        assert self._run is not None, "the run is open"
        facts = {**run_facts(self._root), **environment_facts()}
        start = {
            "command": rerun_command(sys.argv, run_params),
            "pipelines": name_pipelines(run_params),
            "env": str(run_params.get("env") or "base"),
            "mlflow.source.git.commit": facts["git.commit"],  # where MLflow's UI looks for it
        }
        self._run.log_tags({**start, **facts})

    def _log_digests(self, name: str, value: Any) -> None:
        """Tag the run with the data that passes by, each once."""
        digests = data_digests(name, value)
        new = {tag: digest for tag, digest in digests.items() if self._digests.get(tag) != digest}
        if new and self._run is not None:
            run = self._run
            self._digests |= new
            self._soon("data digests", lambda: run.log_tags(new))

    def _log_artifact(self, run: MlflowRun, path: Path, folder: str) -> None:
        """Copy a file, or a model's folder if ``tracking.log_model`` finds its weights worth the space."""
        assert self._parameters is not None, "the context comes before the pipeline"
        choice = self._parameters.tracking.log_model
        if path.is_file() or choice == "always" or (choice == "adapter" and read_tuning(path)["method"] == "lora"):
            run.log_artifact(path, folder)

    def _log_what_is_kept_on_failure(self, run: MlflowRun) -> None:
        """Copy the files that tell why a run failed, if this run has written them past the catalog."""
        assert self._catalog is not None, "the run is open"
        for name, dataset in self._catalog.items():
            marks = (getattr(dataset, "metadata", None) or {}).get("lm_tuning", {})
            path = Path(getattr(dataset, "_filepath", name))
            if marks.get("also_on_failure") and path.is_file() and path.stat().st_mtime >= self._began:
                self._try(
                    f"a copy of '{name}'",
                    lambda path=path, folder=marks["mlflow_artifact"]: run.log_artifact(path, folder),  # type: ignore[misc]
                )

    def _finish(self, status: str, *, with_facts: bool = True) -> None:
        """Close the run with this status, hand the signals back, and write the rest of the metrics.

        The status comes first: should a second Ctrl-C cut the rest short, the run is closed already.

        Args:
            status: ``FINISHED``, ``FAILED`` or ``KILLED``.
            with_facts: note what is known of device and torch by now.
        """
        self._release()
        if self._run is not None and self._is_ours:
            run = self._run
            self._try("its end", lambda: run.close(status))
            if with_facts:  # torch's switches are known only now, since torch is loaded late
                self._try("facts", lambda: run.log_tags({**environment_facts(), **_describe_device(self._root)}))
        self._run = None
        atexit.unregister(self._finish)
        self._signals.restore()
        self._close_streams()

    def _close_streams(self) -> None:
        """Write what training has logged."""
        while self._streams:
            self._streams.pop().close()

    def _soon(self, what: str, action: Callable[[], None]) -> None:
        """Log now, or once a resume has been accepted."""
        if self._held is None:
            self._try(what, action)
        else:
            self._held.append((what, action))

    def _release(self) -> None:
        """Log what was held back."""
        held, self._held = self._held or [], None
        for what, action in held:
            self._try(what, action)

    def _try(self, what: str, action: Callable[[], None]) -> None:
        """Log to MLflow; trouble there is a warning, since results matter more."""
        try:
            action()
        except Interrupted:
            raise
        except Exception as error:
            logger.warning("The MLflow run lacks %s: %s", what, error)


def _is_refusal(error: BaseException | None) -> bool:
    """Say whether the user was told to mend something, rather than that something broke."""
    return error is not None and (isinstance(error, UserError) or _is_refusal(error.__cause__))


def _find_resumable_run(checkpoints: Path) -> Run | None:
    """Return the run that wrote the checkpoint to resume, if the tracking store still has it."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    checkpoint = find_latest(checkpoints)
    if checkpoint is None or not checkpoint.facts.get("mlflow_run_id"):
        return None
    run_id = checkpoint.facts["mlflow_run_id"]
    try:
        run = MlflowClient().get_run(run_id)
    except MlflowException:
        run = None
    if run is None or run.info.lifecycle_stage != "active":
        logger.warning("The MLflow run %s of %s is gone, so a new one is started.", run_id, checkpoint.path)
        return None
    return run


def _read_mlflow_config(context: KedroContext) -> dict[str, Any]:
    """Return ``mlflow.yml`` of the environment, or nothing where there is none."""
    from kedro.config import MissingConfigException

    try:
        return dict(context.config_loader["mlflow"])
    except MissingConfigException:
        return {}


def _hide_password(uri: str) -> None:
    """Keep the password of a tracking server to ourselves."""
    if mask_address(uri) != uri:
        remember_settings(uri)
        # At the end of a run MLflow prints its address, password included.
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")


def complete_mlflow_config(config: Mapping[str, Any], experiment: str, root: Path) -> dict[str, Any]:
    """Add what ``mlflow.yml`` leaves open.

    Args:
        config: content of ``mlflow.yml``.
        experiment: name of the experiment, which is a parameter.
        root: project folder; without any tracking URI runs go to a database there.

    Returns:
        A configuration for kedro-mlflow. A folder for artifacts within the project is left out when a server keeps the
        runs, since it would mean a folder on the server.
    """
    server = dict(config.get("server") or {})
    uri = (
        server.get("mlflow_tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root / 'mlflow.db'}"
    )
    tracking = dict(config.get("tracking") or {})
    creation = dict((tracking.get("experiment") or {}).get("create_experiment_kwargs") or {})
    is_local = uri.split(":")[0] in {"sqlite", "postgresql", "mysql", "mssql"}
    if not is_local and "://" not in str(creation.get("artifact_location") or "://"):
        del creation["artifact_location"]
    tracking["experiment"] = {
        **(tracking.get("experiment") or {}),
        "name": experiment,
        "create_experiment_kwargs": creation,
    }
    return {**config, "server": {**server, "mlflow_tracking_uri": uri}, "tracking": tracking}


def _describe_device(root: Path) -> dict[str, str]:
    """Return the facts that may differ once torch is loaded."""
    return {name: value for name, value in run_facts(root).items() if name.startswith(("device.", "torch."))}
