"""Check, before the first node, that what a pipeline starts from is stored."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kedro.framework.hooks import hook_impl

from lm_tuning.datasets.entry import CatalogEntry, find_way
from lm_tuning.errors import UserError

if TYPE_CHECKING:
    from kedro.io import CatalogProtocol
    from kedro.pipeline import Pipeline


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
