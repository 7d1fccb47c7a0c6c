"""A report that a node writes while it works, so that one that fails leaves what it knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm_tuning.datasets.handed import HandedDataset
from lm_tuning.secrets import mask_report
from lm_tuning.storage.atomic import write_json_atomic


class LiveReport:
    """A JSON file that is replaced as a whole, as often as there is something new.

    It survives pickling: the copy writes the same file.

    Attributes:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        """Choose the file; nothing is written before the first report."""
        self.path = path

    def write(self, report: dict[str, Any]) -> None:
        """Replace the file; secrets of this run are masked.

        Args:
            report: values that JSON knows.

        Raises:
            UserError: the disk is full; the previous content stays.
        """
        write_json_atomic(self.path, mask_report(report))


class LiveReportDataset(HandedDataset[LiveReport]):
    """Hand a node a report to write while it works; the same file is the entry that its result is saved to.

    Example:
        .. code-block:: yaml

            live_health:
              type: lm_tuning.datasets.LiveReportDataset
              filepath: data/08_reporting/default/health.json
    """

    who_writes = "is written by the node that takes the report as input"

    def load(self) -> LiveReport:
        """Return the report, without touching the file."""
        return LiveReport(self._filepath)
