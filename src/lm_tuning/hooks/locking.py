"""Give each run its output folders alone, and keep an earlier run's report from passing for its own."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedro.framework.hooks import hook_impl

from lm_tuning.hooks.parameters import settle_parameters
from lm_tuning.storage.locks import OutputLock

if TYPE_CHECKING:
    from kedro.framework.context import KedroContext
    from kedro.io import CatalogProtocol
    from kedro.pipeline import Pipeline


#: Lock files lie apart from the results, so that a user may delete the results of an output at any time.
LOCK_FOLDER = Path("data/.locks")


class OutputLockHook:
    """Hold the lock of an output while pipelines run."""

    def __init__(self) -> None:
        """Begin without a lock."""
        self._root = Path()
        self._output = ""
        self._held = ExitStack()

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Learn which output this session writes to."""
        self._root = Path(context.project_path)
        self._output = settle_parameters(context).parameters.output

    @hook_impl(wrapper=True)
    def before_pipeline_run(self) -> Generator[None, Any, Any]:
        """Acquire the lock before any other hook starts, so that a refused run leaves no trace in MLflow.

        Raises:
            UserError: if another run writes to the same output, naming it and the process that holds it.
        """
        self._held.close()  # one that Ctrl-C in a notebook has left: Kedro calls no hook then
        path = self._root / LOCK_FOLDER / f"{self._output}.lock"
        lock = OutputLock(path, subject=f"The output '{self._output}' (folders data/*/{self._output})")
        self._held.enter_context(lock)
        try:
            return (yield)  # the other hooks of this name
        except BaseException:
            self._held.close()
            raise

    @hook_impl(wrapper=True)
    def after_pipeline_run(self) -> Generator[None, Any, Any]:
        """Give the lock back after all other hooks."""
        try:
            return (yield)
        finally:
            self._held.close()

    on_pipeline_error = after_pipeline_run


class EarlierReportsHook:
    """Mark each report that a run will write, so that a run which ends before leaves none that looks like its own."""

    @hook_impl(trylast=True)  # behind the lock: another run may be writing the report
    def before_pipeline_run(self, pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Mark the reports whose first section the pipeline makes; saving the section takes the mark away."""
        from lm_tuning.datasets.report_sections import ReportSectionDataset

        # The first section alone: saving a later one keeps those before it, which are this run's or still true.
        for name in sorted(pipeline.all_outputs()):
            dataset = catalog.get(name)
            if isinstance(dataset, ReportSectionDataset) and dataset.is_first:
                dataset.mark_earlier()
