"""A file that a node has written already: saving only gives it its place."""

from __future__ import annotations

import shutil
from pathlib import Path

from lm_tuning.datasets.finished import FinishedDataset
from lm_tuning.storage.atomic import replacing_file


class FinishedFileDataset(FinishedDataset):
    """Move a finished file, such as a trace, to where it is kept; the file of before stays until then.

    Example:
        .. code-block:: yaml

            profile_trace:
              type: lm_tuning.datasets.FinishedFileDataset
              filepath: data/08_reporting/default/profile/trace.json.gz
    """

    def save(self, data: Path) -> None:
        """Move a file here, also from another disk."""
        with replacing_file(self._filepath) as aside:
            shutil.move(data, aside)

    def _exists(self) -> bool:
        return self._filepath.is_file()
