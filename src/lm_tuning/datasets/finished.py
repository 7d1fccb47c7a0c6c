"""What a node has written already: a dataset only gives it its place, and hands the place on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kedro.io import AbstractDataset

from lm_tuning.datasets.entry import CatalogEntry


class FinishedDataset(CatalogEntry, AbstractDataset[Path, Path]):
    """Base of datasets that keep one finished file or folder; a subclass says how it is moved and when it is there."""

    def __init__(self, filepath: str, metadata: dict[str, Any] | None = None) -> None:
        """Point at the place.

        Args:
            filepath: where the file or folder is kept.
            metadata: for plugins and our tracking hook.
        """
        self._filepath = Path(filepath)
        self.metadata = metadata

    def load(self) -> Path:
        """Return the path.

        Raises:
            UserError: if it is missing, naming entry, path and the pipeline that makes it (as the cause of Kedro's
                ``DatasetError``).
        """
        self.require(self._filepath, self._exists())
        return self._filepath

    def _describe(self) -> dict[str, Any]:
        return {"filepath": self._filepath}
