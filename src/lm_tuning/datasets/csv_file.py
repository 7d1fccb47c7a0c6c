"""A CSV file of its own, since its class brings pandas."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from kedro_datasets._typing import TablePreview
from kedro_datasets.pandas import CSVDataset as KedroCSVDataset

from lm_tuning.datasets.entry import CatalogEntry
from lm_tuning.json_types import JsonObject
from lm_tuning.secrets import mask_report
from lm_tuning.storage.atomic import replacing_file


class CSVDataset(CatalogEntry, KedroCSVDataset):
    """A table as CSV that keeps its previous content when a save fails.

    Only an empty cell counts as missing on load, so the words ``null``, ``None`` and ``N/A`` stay words.

    Example:
        .. code-block:: yaml

            training_summary:
              type: lm_tuning.datasets.CSVDataset
              filepath: data/08_reporting/default/training_summary.csv
    """

    DEFAULT_LOAD_ARGS = {"keep_default_na": False, "na_values": [""]}  # noqa: RUF012 - as upstream declares it

    def load(self) -> pd.DataFrame:
        """Return the table.

        Raises:
            UserError: if the file is missing, naming entry, path and the pipeline that makes it (as the cause of
                Kedro's ``DatasetError``).
        """
        self.require(Path(self._filepath), self._exists())
        frame: pd.DataFrame = pd.read_csv(Path(self._get_load_path()), **self._load_args)  # type: ignore[assignment]
        return frame

    def save(self, data: pd.DataFrame | list[JsonObject]) -> None:
        """Write a frame, or a list with one dict a row and secrets of this run masked, then replace the file."""
        # A frame comes from a user's own node, and its values may be of any type.
        frame = data if isinstance(data, pd.DataFrame) else pd.DataFrame(mask_report(data))
        with replacing_file(Path(self._get_save_path())) as aside:
            frame.to_csv(aside, **self._save_args)
        self._invalidate_cache()  # fsspec remembers what lies in a folder

    def preview(self, nrows: int = 5) -> TablePreview:
        """Return the first rows.

        Args:
            nrows: number of rows.
        """
        if not self._exists():
            return None
        try:
            frame = pd.read_csv(Path(self._get_load_path()), **{**self._load_args, "nrows": nrows})
        except pd.errors.EmptyDataError:  # an empty list was saved, which names no columns either
            frame = pd.DataFrame()
        return TablePreview(frame.to_dict(orient="split"))
