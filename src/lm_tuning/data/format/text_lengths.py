"""How long the texts of the rows are, in characters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_NO_TEXT = -1


class TextLengths:
    """Count the characters of each field of each row: four bytes of memory for each."""

    def __init__(self, fields: Sequence[str]) -> None:
        """Start with no row.

        Args:
            fields: columns of text of the batches.
        """
        self._lengths: dict[str, list[npt.NDArray[np.int32]]] = {name: [] for name in fields}

    def add(self, batch: pa.RecordBatch) -> None:
        """Count the texts of some rows.

        Args:
            batch: has the fields; a null has no length.
        """
        import pyarrow.compute as pc

        for name, lengths in self._lengths.items():
            counted = pc.fill_null(pc.utf8_length(batch.column(name)), _NO_TEXT)
            lengths.append(counted.to_numpy(zero_copy_only=False).astype(np.int32))

    def describe(self, keep: npt.NDArray[np.bool_] | None = None) -> dict[str, dict[str, int | float]]:
        """Return by field what its texts are like, without fields that no row has.

        Args:
            keep: ``(rows,)``: rows that count; None for all.

        Returns:
            ``num_rows`` that have a text, and in characters ``mean``, ``p50``, ``p90``, ``p99`` and ``longest``. Every
            quantile is a length that occurs.
        """
        described: dict[str, dict[str, int | float]] = {}
        for name, parts in self._lengths.items():
            lengths = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
            lengths = lengths if keep is None else lengths[keep]
            lengths = lengths[lengths != _NO_TEXT]
            if not len(lengths):
                continue
            quantiles = np.quantile(lengths, list(_QUANTILES.values()), method="higher")
            described[name] = {
                "num_rows": len(lengths),
                "mean": round(float(lengths.mean(dtype=np.float64)), 2),
                **{quantile: int(value) for quantile, value in zip(_QUANTILES, quantiles, strict=True)},
                "longest": int(lengths.max()),
            }
        return described
