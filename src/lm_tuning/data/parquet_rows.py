"""Stream the rows of a Parquet file, reading only the columns that are used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lm_tuning.data.problems import RowProblem
from lm_tuning.data.reading import Row, RowSource, check_columns
from lm_tuning.errors import UserError

_BATCH_ROWS = 2048


class ParquetRows(RowSource):
    """The rows of a Parquet file; values keep the types that the file declares.

    Lists of structs give every struct every key of the column, with null where a row had none; such keys are dropped.
    """

    def __init__(self, path: Path) -> None:
        """Read the schema.

        Args:
            path: an existing file.

        Raises:
            UserError: the file is no Parquet, has no rows, or names a column twice.
        """
        super().__init__(path)
        with self._open() as file:
            self.columns = list(file.schema_arrow.names)
            self._num_rows = int(file.metadata.num_rows)
        if not self._num_rows:
            raise UserError(f"{path} has no rows.")
        check_columns(path, self.columns)
        self._selected = self.columns
        self._rows_done = 0

    def __iter__(self) -> Iterator[tuple[int, Row | RowProblem]]:
        """Yield each row; see the base class."""
        import pyarrow as pa

        names = self._selected
        number = 0
        self._rows_done = 0
        with self._open() as file:
            try:
                for batch in file.iter_batches(_BATCH_ROWS, columns=names):
                    values = [_values(batch.column(name)) for name in names]
                    for row in zip(*values, strict=True):
                        number += 1
                        yield number, dict(zip(names, row, strict=True))
                    self._rows_done = number
            except (OSError, pa.ArrowException) as error:
                raise UserError(f"{self.path} is damaged after row {number:,}: {error}") from error

    def select(self, columns: Iterable[str]) -> None:
        """Read only these columns from now on; see the base class."""
        self._selected = list(dict.fromkeys(columns))

    def progress(self) -> tuple[int, int, str]:
        """Return rows read, rows in all, and their unit."""
        return self._rows_done, self._num_rows, "rows"

    def _open(self) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return pq.ParquetFile(self.path)
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{self.path} is no readable Parquet file: {error}") from error


def _values(column: Any) -> list[Any]:
    import pyarrow as pa

    values: list[Any] = column.to_pylist()
    return [_without_nulls(value) for value in values] if pa.types.is_nested(column.type) else values


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
