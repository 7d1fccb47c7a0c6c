"""Keep the report of an earlier run from passing for that of the present one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kedro.framework.hooks import hook_impl

if TYPE_CHECKING:
    from kedro.io import CatalogProtocol
    from kedro.pipeline import Pipeline


class EarlierReportsHook:
    """Mark each report that a run will write, so that a run which ends before leaves none that looks like its own."""

    @hook_impl(trylast=True)  # behind the lock: another run may be writing the report
    def before_pipeline_run(self, pipeline: Pipeline, catalog: CatalogProtocol) -> None:
        """Mark the reports whose first section the pipeline makes; saving the section takes the mark away."""
        from lm_tuning.datasets.report_sections import ReportSectionDataset

        for name in sorted(pipeline.all_outputs()):
            dataset = catalog.get(name)
            if isinstance(dataset, ReportSectionDataset) and dataset.is_first:
                dataset.mark_earlier()
