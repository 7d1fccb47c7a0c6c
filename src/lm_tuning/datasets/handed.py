"""What a node writes into by itself: a dataset only hands it over."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

from kedro.io import AbstractDataset, DatasetError

from lm_tuning.datasets.entry import CatalogEntry

_Handed = TypeVar("_Handed")


class HandedDataset(CatalogEntry, AbstractDataset[NoReturn, _Handed]):
    """Base of datasets that hand a node a place to write into; a subclass says what ``load`` returns.

    Attributes:
        who_writes: half a sentence for whoever saves to it by name.
    """

    who_writes: ClassVar[str]

    def __init__(self, filepath: str, metadata: dict[str, Any] | None = None) -> None:
        """Point at the place.

        Args:
            filepath: file or folder; it need not exist.
            metadata: for plugins and our tracking hook.
        """
        self._filepath = Path(filepath)
        self.metadata = metadata

    def save(self, data: NoReturn) -> NoReturn:
        """Refuse: a node writes there itself."""
        raise DatasetError(f"'{self._filepath}' {self.who_writes}.")

    def _exists(self) -> bool:
        return True

    def _describe(self) -> dict[str, Any]:
        return {"filepath": self._filepath}
