"""Kedro datasets that are ours: they load, save and preview, and nothing else.

Promises that a save that fails leaves what was there before. May import Kedro, MLflow, ``tracking`` and what lies
below. Entries: the classes, which catalog entries name. A class is imported when the catalog first needs it, so a
pipeline that writes no CSV does not pay for pandas.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: Our classes, which catalog entries name as lm_tuning.datasets.<class>: the module of each, and what an entry may say
#: beside ``type`` and ``metadata``.
CLASSES = {
    "CSVDataset": ("csv_file", "filepath load_args save_args"),
    "FigureDataset": ("files", "filepath save_args"),
    "FigureFolderDataset": ("figures", "filepath save_args"),
    "JSONDataset": ("files", "filepath save_args"),
    "TextDataset": ("files", "filepath"),
    "FinishedFileDataset": ("folders", "filepath"),
    "FolderDataset": ("folders", "filepath"),
    "FolderStoreDataset": ("folders", "filepath keep"),
    "MlflowModelDataset": ("mlflow_model", ""),
    "ModelFolderDataset": ("folders", "filepath"),
    "StoredFolderDataset": ("folders", "filepath keep"),
    "LiveReportDataset": ("report_sections", "filepath"),
    "MetricStreamDataset": ("metric_stream", ""),
    "ReportSectionDataset": ("report_sections", "filepath section sections title"),
}
__all__ = list(CLASSES)


def __getattr__(name: str) -> Any:
    """Import a dataset class on first use."""
    # Python asks here for what the module does not have (PEP 562); what was imported once is found in its own module.
    if name not in CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{CLASSES[name][0]}"), name)
