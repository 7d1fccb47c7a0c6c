"""Stream the rows of a data set on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lm_tuning.data.check.findings import RowProblem
from lm_tuning.data.readers.base import DEFAULT_SETTINGS, ReadSettings
from lm_tuning.data.readers.columnar import BATCH_ROWS, ColumnarRows
from lm_tuning.data.records import SourceFile
from lm_tuning.data.sources.hub import load_hub_split
from lm_tuning.data.sources.opening import RawFile

if TYPE_CHECKING:
    import pyarrow as pa


class HubRows(ColumnarRows):
    """The rows of one split."""

    def __init__(self, file: SourceFile, settings: ReadSettings = DEFAULT_SETTINGS) -> None:
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
        what = f"The split {file['split']!r} of the hub data set {self.path}"
        self._begin(self._dataset.features.arrow_schema, len(self._dataset), what=what)

    def _batches(self, names: list[str]) -> Iterator[pa.RecordBatch | RowProblem]:
        for table in self._dataset.select_columns(names).with_format("arrow").iter(BATCH_ROWS):
            yield from table.to_batches()
