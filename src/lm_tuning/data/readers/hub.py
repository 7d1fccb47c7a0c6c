"""Stream the rows of a data set on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lm_tuning.data.check.findings import RowProblem
from lm_tuning.data.readers.base import DEFAULT_SETTINGS, ReadSettings, Row, RowSource, check_columns
from lm_tuning.data.readers.columnar import BATCH_ROWS, batch_rows, column_readers
from lm_tuning.data.sources.hub import load_hub_split
from lm_tuning.data.sources.opening import RawFile
from lm_tuning.errors import UserError


class HubRows(RowSource):
    """The rows of one split; values keep the types of the declared features, see ``column_readers``."""

    def __init__(self, file: Mapping[str, Any], settings: ReadSettings = DEFAULT_SETTINGS) -> None:
        """Download the split into the cache of the hub's client, unless it is there.

        Args:
            file: ``path`` (the name), ``config``, ``split``, ``revision`` and ``digest``, see ``describe_files``.
            settings: the limit of a row.

        Raises:
            UserError: the hub cannot be reached and the cache lacks the set, there is no such set, configuration or
                split, or it has no rows.
        """
        super().__init__(RawFile(file), "hub", settings)
        self.name = self.path
        self._dataset = load_hub_split(file)
        self.columns = list(self._dataset.column_names)
        self._num_rows = len(self._dataset)
        if not self._num_rows:
            raise UserError(f"The split {file['split']!r} of the hub data set {self.path} has no rows.")
        check_columns(self.path, self.columns)
        self._rows_done = 0

    def _rows(self) -> Iterator[tuple[int, Row | RowProblem]]:
        names = self.selected
        dataset = self._dataset.select_columns(names)
        readers = column_readers(dataset.features.arrow_schema, names)
        number = self._rows_done = 0
        for table in dataset.with_format("arrow").iter(BATCH_ROWS):
            for batch in table.to_batches():
                for row in batch_rows(batch, readers, max_row_bytes=self.settings.max_row_bytes):
                    number += 1
                    yield number, row
            self._rows_done = number

    def _progress(self) -> tuple[int, int, str]:
        return self._rows_done, self._num_rows, "rows"
