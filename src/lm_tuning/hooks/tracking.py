"""Track each ``kedro run`` as one MLflow run: settings, facts, artifacts, and how it ended."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedro.framework.hooks import hook_impl

from lm_tuning.datasets.entry import read_marks
from lm_tuning.errors import Interrupted, UserError, causes_of
from lm_tuning.hooks.mlflow_config import set_up_mlflow
from lm_tuning.hooks.mlflow_run import MlflowRun
from lm_tuning.hooks.parameters import settle_parameters
from lm_tuning.models.tuned import read_tuning
from lm_tuning.runtime.facts import environment_facts, run_facts
from lm_tuning.runtime.stopping import StopSignals, last_words, stop_if_requested, was_interrupted
from lm_tuning.secrets import mask
from lm_tuning.tracking.records import RunHeader, RunParams, RunStatus
from lm_tuning.tracking.run_description import data_digests, name_pipelines, numbers_of, rerun_command
from lm_tuning.tracking.trouble import strip_passwords
from lm_tuning.training.checkpoints.format import find_latest

if TYPE_CHECKING:
    from kedro.framework.context import KedroContext
    from kedro.io import CatalogProtocol
    from kedro.pipeline import Pipeline
    from kedro_mlflow.config.kedro_mlflow_config import KedroMlflowConfig
    from kedro_mlflow.framework.hooks import MlflowHook

    from lm_tuning.parameters import Parameters

logger = logging.getLogger(__name__)

#: Methods whose tuned model is an adapter, which is small enough to keep with every run.
ADAPTER_METHODS = {"lora", "qlora"}


class TrackingHook:
    """Replace kedro-mlflow's hook, which does the configuration for us and none of the logging.

    It logs each setting of a typed group, where the plugin logs the group as one text; goes on with the run of a
    resumed training; and closes a run as FAILED or KILLED, where the plugin leaves an interrupted one finished or
    running. Nothing here waits long for the tracking store: what is logged goes to a journal on disk, and a thread
    sends it. Trouble with the store is a warning: it never costs a result.
    """

    # Known once there is a context, which Kedro makes before it calls any other hook.
    _plugin: MlflowHook
    _config: KedroMlflowConfig
    _parameters: Parameters

    def __init__(self) -> None:
        """Begin without a run; MLflow is imported with the first session."""
        self._root = Path()
        self._signals = StopSignals()
        self._catalog: CatalogProtocol | None = None
        self._run: MlflowRun | None = None
        self._exit = ExitStack()
        self._digests: dict[str, str] = {}
        self._began = 0.0
        self._logged: set[Path] = set()
        # A resume that is refused must leave the run that it would have continued as it was. So until the training
        # has gone on, what would overwrite something is held back.
        self._held: list[tuple[str, Callable[[], None]]] | None = None

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Choose the tracking store and the experiment; the store is asked nothing yet.

        Raises:
            UserError: if ``mlflow.yml`` has unknown keys or values of the wrong type, or the store's address is none.
        """
        from kedro_mlflow.framework.hooks import MlflowHook

        self._finish("KILLED")  # a run that Ctrl-C in a notebook has left open: Kedro calls no hook then
        self._root = Path(context.project_path)
        self._parameters = settle_parameters(context).parameters
        self._config = set_up_mlflow(context, self._parameters.tracking)
        # Not registered with Kedro: it would set MLflow up, wait for the store, and log everything a second time.
        self._plugin = MlflowHook()

    @hook_impl
    def after_catalog_created(  # noqa: PLR0917 - as Kedro declares it
        self,
        catalog: CatalogProtocol,
        conf_catalog: object,
        conf_creds: object,
        parameters: object,
        save_version: str,
        load_versions: dict[str, str],
    ) -> None:
        """Let the plugin name the metric datasets that a user may have added."""
        self._plugin.after_catalog_created(catalog, conf_catalog, conf_creds, parameters, save_version, load_versions)

    @hook_impl(trylast=True)
    def before_pipeline_run(self, run_params: RunParams, pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Open the run and log what is known before the first node.

        Raises:
            UserError: the tracking store is away and ``tracking.on_unreachable`` is ``stop``.
        """
        self._catalog, self._digests, self._logged, self._began = catalog, {}, set(), time.time()
        if not self._is_enabled(run_params):
            return
        self._signals.install()
        # Kedro calls no hook for what is not an Exception, such as SystemExit.
        atexit.register(self._finish, "KILLED", is_hurried=True)
        try:
            run = self._open_run(run_params, pipeline, catalog)
            # Every parameter with its value of now, also those that no file names.
            self._try("settings", lambda: run.log_settings(self._parameters.model_dump(mode="json")))
            self._try("facts", lambda: run.log_tags(self._describe_start(run_params)))
        except BaseException as error:
            is_hurried = was_interrupted(error)
            self._finish("KILLED" if is_hurried else "FAILED", is_hurried=is_hurried)
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
        if self._run is not None:
            self._run.enter()

    @hook_impl
    def after_dataset_loaded(self, dataset_name: str, data: Any) -> None:
        """Log which data the run started from."""
        self._log_digests(dataset_name, data)

    @hook_impl
    def after_dataset_saved(self, dataset_name: str, data: Any) -> None:
        """Copy what the catalog marks as an artifact; log its figures and its digests."""
        if self._run is None or self._catalog is None:
            return
        run, dataset = self._run, self._catalog.get(dataset_name)
        marks = read_marks(dataset)
        if metrics := marks.get("mlflow_metrics"):
            figures = data if metrics is True else data[metrics]
            split = data.get("split") if isinstance(data, Mapping) else None
            self._soon(
                f"the figures of '{dataset_name}'",
                lambda: run.log_figures(dataset_name, numbers_of(figures), split=split),
            )
        if folder := marks.get("mlflow_artifact"):
            # Copied at once: a later run of the same output replaces the file.
            paths = getattr(dataset, "artifact_paths", None) or [Path(getattr(dataset, "_filepath", dataset_name))]
            for path in paths:
                what = f"a copy of '{dataset_name}'" + (f" ({path.name})" if len(paths) > 1 else "")
                self._logged.add(path)
                self._soon(what, partial(self._log_artifact, run, path, folder, what))
        self._log_digests(dataset_name, data)
        if dataset_name == "tuned_model":  # the training has gone on to its end
            self._release()

    # First of all hooks: when the others have done, the output's lock is free, and another run may replace the files.
    @hook_impl(tryfirst=True)
    def after_pipeline_run(self) -> None:
        """Close the run as finished, once everything is sent."""
        self._finish("FINISHED")

    @hook_impl(tryfirst=True)
    def on_pipeline_error(self, error: Exception) -> None:
        """Close the run as failed or killed, and leave the error to Kedro."""
        is_refusal = False
        if self._run is not None:
            # Not after a step: what a health check ends then has gone on in the run of the checkpoint.
            is_user_error = any(isinstance(cause, UserError) for cause in causes_of(error))
            is_refusal = self._held is not None and not self._run.journal.has_steps and is_user_error
            run, text = self._run, f"{type(error).__name__}: {error}"
            if is_refusal:
                self._held = None
                self._try("the refusal", lambda: run.take_resume_back(text))
            else:
                self._try("the reports of a failed run", self._log_what_is_kept_on_failure)
                self._try("the error", lambda: run.log_tags({"error": text}))
        status: RunStatus = "KILLED" if was_interrupted(error) else "FAILED"
        self._finish(None if is_refusal else status, is_hurried=status == "KILLED")

    def _is_enabled(self, run_params: RunParams) -> bool:
        """Respect ``tracking.disable_tracking.pipelines`` of ``mlflow.yml``."""
        disabled = self._config.tracking.disable_tracking.pipelines
        return not all(name in disabled for name in run_params.get("pipeline_names") or ["__default__"])

    def _open_run(self, run_params: RunParams, pipeline: Pipeline, catalog: CatalogProtocol) -> MlflowRun:
        """Start a run, or go on with that of the checkpoint to resume, or log into one that the user has opened."""
        import mlflow

        active, tracking = mlflow.active_run(), self._parameters.tracking
        # The variable names a run to go on with, once, as for mlflow.start_run.
        run_id = os.environ.pop("MLFLOW_RUN_ID", None) if active is None else str(active.info.run_id)
        if active is None and self._parameters.train.resume and "checkpoints" in pipeline.inputs():
            checkpoint = find_latest(catalog.load("checkpoints"))
            if checkpoint is not None and checkpoint.facts.get("mlflow_run_id"):
                run_id, self._held = checkpoint.facts["mlflow_run_id"], []
        creation = self._config.tracking.experiment.create_experiment_kwargs
        uri = str(self._config.server.mlflow_tracking_uri)
        header: RunHeader = {
            "uri": strip_passwords(uri),
            "experiment": {
                "name": tracking.experiment,
                "artifact_location": creation.artifact_location,
                "tags": creation.tags,
            },
            "run_name": mask(tracking.run_name or f"{name_pipelines(run_params)} {self._parameters.output}"),
            "run_id": run_id,
            "is_ours": active is None,
        }
        self._run = run = MlflowRun(self._root, uri, header)
        self._exit.enter_context(last_words(self._say_last_words))
        try:
            run.open(must_answer=tracking.on_unreachable == "stop")
        except UserError as error:
            self._run = None
            run.discard(str(error))
            raise
        return run

    def _describe_start(self, run_params: RunParams) -> dict[str, str]:
        """Return how the run was started, from which code, and on what machine."""
        facts = {**run_facts(self._root), **environment_facts()}
        start = {
            "command": rerun_command(sys.argv, run_params),
            "pipelines": name_pipelines(run_params),
            "env": str(run_params.get("env") or "base"),
            "mlflow.source.git.commit": facts["git.commit"],  # where MLflow's UI looks for it
        }
        return {**start, **facts}

    def _log_digests(self, name: str, value: Any) -> None:
        """Tag the run with the data that passes by, each once."""
        digests = data_digests(name, value)
        new = {tag: digest for tag, digest in digests.items() if self._digests.get(tag) != digest}
        if new and self._run is not None:
            self._digests |= new
            self._soon("data digests", partial(self._run.log_tags, new))

    def _log_artifact(self, run: MlflowRun, path: Path, folder: str, what: str) -> None:
        """Copy a file, or a model's folder if ``tracking.log_model`` finds its weights worth the space."""
        choice = self._parameters.tracking.log_model
        is_wanted = path.is_file() or choice == "always"
        if is_wanted or (choice == "adapter" and read_tuning(path)["method"] in ADAPTER_METHODS):
            run.log_artifact(path, folder, what)

    def _log_what_is_kept_on_failure(self) -> None:
        """Copy the files that tell why a run failed, if this run has written them past the catalog."""
        assert self._catalog is not None, "the run is open"
        for name, dataset in self._catalog.items():
            marks, path = read_marks(dataset), Path(getattr(dataset, "_filepath", ""))
            if not marks.get("also_on_failure") or path in self._logged or not path.is_file():
                continue
            # An earlier run's file has the same path.
            if path.stat().st_mtime >= self._began and self._run is not None:
                run, what = self._run, f"a copy of '{name}'"
                self._try(what, lambda path=path, what=what: run.log_artifact(path, marks["mlflow_artifact"], what))  # type: ignore[misc]  # noqa: B023

    def _finish(self, status: RunStatus | None, *, is_hurried: bool = False) -> None:
        """Close the run with this status, hand the signals back, and wait a little until everything is sent.

        The status is noted first: should a second Ctrl-C cut the rest short, it is in the journal already.

        Args:
            status: ``FINISHED``, ``FAILED`` or ``KILLED``; None for a resume that was refused.
            is_hurried: a signal has asked to stop, so nothing is waited for that takes long.
        """
        self._release()
        atexit.unregister(self._finish)
        try:
            if self._run is not None:
                run = self._run
                run.leave(status)
                self._run = None
                if status is not None:  # torch's switches are known only now, since torch is loaded late
                    facts = {**environment_facts(), **_describe_device(self._root)}
                    self._try("facts", lambda: run.log_tags(facts))
                run.send_rest(is_hurried=is_hurried)
        finally:
            self._exit.close()
            self._signals.restore()

    def _say_last_words(self) -> None:
        """Keep what was logged, and that the run was killed: the process is about to be ended from another thread."""
        run = self._run
        if run is not None:
            self._release()
            run.leave("KILLED", timeout_seconds=0.3)

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


def _describe_device(root: Path) -> dict[str, str]:
    """Return the facts that may differ once torch is loaded."""
    return {name: value for name, value in run_facts(root).items() if name.startswith(("device.", "torch."))}
