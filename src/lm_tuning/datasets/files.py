"""Small files, saved whole or not at all, with a preview in kedro viz."""

from __future__ import annotations

import base64
import html
import io
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kedro.io import DatasetError
from kedro_datasets._typing import HTMLPreview, ImagePreview, JSONPreview
from kedro_datasets.json import JSONDataset as KedroJSONDataset
from kedro_datasets.text import TextDataset as KedroTextDataset

from lm_tuning.datasets.entry import CatalogEntry, PathDataset
from lm_tuning.json_types import JsonObject
from lm_tuning.secrets import mask_known, mask_report
from lm_tuning.storage.atomic import write_bytes_atomic, write_text_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class JSONDataset(CatalogEntry, KedroJSONDataset):
    """A JSON file that keeps its previous content when a save fails.

    Example:
        .. code-block:: yaml

            evaluation:
              type: lm_tuning.datasets.JSONDataset
              filepath: data/08_reporting/default/evaluation.json
    """

    # Letters stay readable, in whatever script.
    DEFAULT_SAVE_ARGS = {"indent": 2, "ensure_ascii": False}  # noqa: RUF012 - as upstream declares it

    def load(self) -> Any:
        """Return the parsed value.

        Raises:
            UserError: if the file is missing, naming entry, path and the pipeline that makes it (as the cause of
                Kedro's ``DatasetError``).
        """
        # Not upstream's reader: it raises about a missing file in fsspec's words.
        self.require(Path(self._filepath), self._exists())
        return json.loads(Path(self._get_load_path()).read_text(encoding="utf-8"))

    def save(self, data: Any) -> None:
        """Encode the value, then replace the file; in a report secrets of this run are masked."""
        data = mask_report(data) if self.is_report else data
        # Encoded as a whole before the disk is touched: a value that JSON does not know leaves the old file as it was.
        write_text_atomic(Path(self._get_save_path()), json.dumps(data, **self._save_args) + "\n")
        self._invalidate_cache()

    def preview(self) -> JSONPreview:
        """Return the value as JSON that a browser can parse: NaN and infinities become their names."""
        if not self._exists():
            return None
        # Python writes NaN as it is, which no browser parses.
        return JSONPreview(json.dumps(_name_non_finite(self.load()), ensure_ascii=False))


class TextDataset(CatalogEntry, KedroTextDataset):
    """A text file in UTF-8 that keeps its previous content when a save fails.

    Example:
        .. code-block:: yaml

            evaluation_report:
              type: lm_tuning.datasets.TextDataset
              filepath: data/08_reporting/default/evaluation.md
    """

    def load(self) -> str:
        """Return the text.

        Raises:
            UserError: if the file is missing, naming entry, path and the pipeline that makes it (as the cause of
                Kedro's ``DatasetError``).
        """
        self.require(Path(self._filepath), self._exists())
        return Path(self._get_load_path()).read_bytes().decode("utf-8")  # line ends as they are, on every system

    def save(self, data: str) -> None:
        """Replace the file; secrets of this run are masked."""
        write_text_atomic(Path(self._get_save_path()), mask_known(data))
        self._invalidate_cache()

    def preview(self) -> HTMLPreview:
        """Return the text as it is, in a fixed-width font."""
        if not self._exists():
            return None
        return HTMLPreview(f"<pre>{html.escape(self.load())}</pre>")


class FigureDataset(PathDataset["Figure | bytes", NoReturn]):
    """A Matplotlib figure, or an image that was drawn before, as a file that keeps its previous content on failure.

    It stands in for kedro-datasets' class, which imports pyplot with the catalog: seconds that every run would pay,
    whether it draws or not.

    Example:
        .. code-block:: yaml

            loss_curve:
              type: lm_tuning.datasets.FigureDataset
              filepath: data/08_reporting/default/loss_curve.png
    """

    def __init__(self, filepath: str, save_args: JsonObject | None = None, metadata: JsonObject | None = None) -> None:
        """Point at an image file.

        Args:
            filepath: the file; its suffix chooses the format. Previews need ``.png``.
            save_args: passed to ``Figure.savefig``.
            metadata: for plugins and our tracking hook.
        """
        super().__init__(filepath, metadata)
        self._save_args = {"dpi": 120, **(save_args or {})}

    def load(self) -> NoReturn:
        """Refuse: an image does not turn back into a figure."""
        raise DatasetError(f"The image '{self._filepath}' cannot be loaded as a figure.")

    def save(self, data: Figure | bytes) -> None:
        """Draw the figure in memory, then replace the file; bytes are the image already."""
        # The histogram of lengths is kept as bytes beside the tokens, so that reusing those needs no Matplotlib.
        if isinstance(data, bytes):
            write_bytes_atomic(self._filepath, data)
            return
        buffer = io.BytesIO()
        options: Any = {"format": self._filepath.suffix.lstrip(".") or "png", **self._save_args}
        data.savefig(buffer, **options)
        write_bytes_atomic(self._filepath, buffer.getvalue())

    def preview(self) -> ImagePreview:
        """Return the image in base64."""
        if not self._exists():
            return None
        return ImagePreview(base64.b64encode(self._filepath.read_bytes()).decode("ascii"))

    def _exists(self) -> bool:
        return self._filepath.is_file()


def _name_non_finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by their names."""
    if isinstance(value, dict):
        return {key: _name_non_finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_name_non_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
