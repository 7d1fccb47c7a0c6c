"""Plots of one result, of which there may be other ones from run to run, in a folder of their own."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from kedro.io import DatasetError
from kedro_datasets._typing import ImagePreview

from lm_tuning.datasets.entry import PathDataset
from lm_tuning.datasets.files import FigureDataset
from lm_tuning.json_types import JsonObject

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class FigureFolderDataset(PathDataset["Mapping[str, Figure | bytes]", NoReturn]):
    """Keep figures by name as ``<filepath>/<name>.png``; what an earlier run drew beside them is removed.

    Example:
        .. code-block:: yaml

            evaluation_figures:
              type: lm_tuning.datasets.FigureFolderDataset
              filepath: data/08_reporting/default/evaluation_figures
    """

    def __init__(self, filepath: str, save_args: JsonObject | None = None, metadata: JsonObject | None = None) -> None:
        """Point at a folder that holds nothing else.

        Args:
            filepath: the folder; it need not exist.
            save_args: passed to ``Figure.savefig``.
            metadata: for plugins and our tracking hook.
        """
        super().__init__(filepath, metadata)
        self._save_args = save_args

    @property
    def artifact_paths(self) -> list[Path]:
        """Name the files that tracking copies."""
        return sorted(self._filepath.glob("*.png"))

    def load(self) -> NoReturn:
        """Refuse: images do not turn back into figures."""
        raise DatasetError(f"The images in '{self._filepath}' cannot be loaded as figures.")

    def save(self, data: Mapping[str, Figure | bytes]) -> None:
        """Replace each image by itself, then remove those that are none of these; there may be no figure at all."""
        self._filepath.mkdir(parents=True, exist_ok=True)
        for name, figure in data.items():
            FigureDataset(str(self._filepath / f"{name}.png"), self._save_args).save(figure)
        for path in self.artifact_paths:
            if path.stem not in data:
                path.unlink()

    def preview(self) -> ImagePreview:
        """Return the first image in base64."""
        if not self.artifact_paths:
            return None
        return ImagePreview(base64.b64encode(self.artifact_paths[0].read_bytes()).decode("ascii"))

    def _exists(self) -> bool:
        return self._filepath.is_dir()
