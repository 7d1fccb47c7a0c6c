"""A file that a node has written already: saving only gives it its place."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from kedro.io import AbstractDataset

from lm_tuning.datasets.entry import CatalogEntry
from lm_tuning.storage.atomic import replacing_file


class FinishedFileDataset(CatalogEntry, AbstractDataset[Path, Path]):
    """Move a finished file, such as a trace, to where it is kept; the file of before stays until then.

    Example:
        .. code-block:: yaml

            profile_trace:
              type: lm_tuning.datasets.FinishedFileDataset
              filepath: data/08_reporting/default/profile/trace.json.gz
    """

    def __init__(self, filepath: str, metadata: dict[str, Any] | None = None) -> None:
        """Point at the file.

        Args:
            filepath: where it is kept.
            metadata: for plugins and our tracking hook.
        """
        self._filepath = Path(filepath)
        self.metadata = metadata

    def load(self) -> Path:
        """Return the file's path.

        Raises:
            UserError: if it is missing, naming entry, path and the pipeline that makes it (as the cause of Kedro's
                ``DatasetError``).
        """
        self.require(self._filepath, self._exists())
        return self._filepath

    def save(self, data: Path) -> None:
        """Move a file here, also from another disk."""
        with replacing_file(self._filepath) as aside:
            shutil.move(data, aside)

    def _exists(self) -> bool:
        return self._filepath.is_file()

    def _describe(self) -> dict[str, Any]:
        return {"filepath": self._filepath}
