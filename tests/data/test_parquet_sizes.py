"""How much of a Parquet file is read at a time goes by the bytes of the columns that are read."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lm_tuning.data.readers import columnar
from lm_tuning.data.readers.base import ReadSettings
from lm_tuning.data.sources.opening import RawFile


@pytest.mark.parametrize("name", ["chat", "my.chat"])
def test_a_struct_beyond_the_limit_is_known_by_its_size(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row group of one such row is not read at all, also where the name of the struct holds a dot."""
    path = tmp_path / "rows.parquet"
    chat = [{"text": "x" * 5000 + str(number)} for number in range(3)]
    pq.write_table(pa.table({name: chat, "other": [1, 2, 3]}), path, row_group_size=1, compression="none")
    rows = columnar.ParquetRows(RawFile({"path": str(path)}), "parquet", ReadSettings(max_row_bytes=1000))
    monkeypatch.setattr(columnar, "batch_rows", lambda *_, **__: pytest.fail("it was read"))
    assert [number for number, _ in rows._rows()] == [1, 2, 3]
