"""Kedro datasets that are ours: they load, save and preview, and nothing else.

Promises that a save that fails leaves what was there before. May import Kedro, MLflow, ``tracking`` and what lies
below. Entries: the classes, which catalog entries name. A class is imported when the catalog first needs it, so a
pipeline that writes no CSV does not pay for pandas.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# The one list of our classes; catalog entries name them as lm_tuning.datasets.<class>. OPTIONS in options.py, which a
# test compares with them, says what each takes.
_MODULES = {
    "CSVDataset": "csv_file",
    "FigureDataset": "files",
    "JSONDataset": "files",
    "TextDataset": "files",
    "FinishedFileDataset": "folders",
    "FolderDataset": "folders",
    "FolderStoreDataset": "folders",
    "ModelFolderDataset": "folders",
    "StoredFolderDataset": "folders",
    "LiveReportDataset": "report_sections",
    "MetricStreamDataset": "metric_stream",
    "ReportSectionDataset": "report_sections",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a dataset class on first use."""
    # Python asks here for what the module does not have (PEP 562); what was imported once is found in its own module.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
