"""What a node writes by itself: a dataset hands it a path to write to, or moves what is written to its path."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import ClassVar, NoReturn, TypeVar

from kedro.io import DatasetError

from lm_tuning.datasets.entry import PathDataset
from lm_tuning.storage.atomic import replacing_file

_Handed = TypeVar("_Handed")


class HandedDataset(PathDataset[NoReturn, _Handed]):
    """Base of datasets that hand a node a path to write to; a subclass says what ``load`` returns.

    Attributes:
        who_writes: half a sentence for whoever saves to it by name.
    """

    who_writes: ClassVar[str]

    def save(self, data: NoReturn) -> NoReturn:
        """Refuse: a node writes there itself."""
        raise DatasetError(f"'{self._filepath}' {self.who_writes}.")

    def _exists(self) -> bool:
        return True  # as an input it is always there: whoever loads it makes it


class FinishedDataset(PathDataset[Path, Path]):
    """Base of datasets that keep one finished file or folder; a subclass says how it is moved and when it is there."""

    def load(self) -> Path:
        """Return the path.

        Raises:
            UserError: if it is missing, naming entry, path and the pipeline that makes it (as the cause of Kedro's
                ``DatasetError``).
        """
        self.require(self._filepath, self._exists())
        return self._filepath


class FinishedFileDataset(FinishedDataset):
    """Move a finished file, such as a trace, to where it is kept; the previous file stays until then.

    Example:
        .. code-block:: yaml

            profile_trace:
              type: lm_tuning.datasets.FinishedFileDataset
              filepath: data/08_reporting/default/profile/trace.json.gz
    """

    def save(self, data: Path) -> None:
        """Move a file here, also from another disk."""
        # Beside the target first: a move from another disk is a copy, and would be seen half done.
        with replacing_file(self._filepath) as aside:
            shutil.move(data, aside)

    def _exists(self) -> bool:
        return self._filepath.is_file()
