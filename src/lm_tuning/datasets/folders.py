"""Datasets that give nodes paths, to folders and to finished files: saving only publishes, moves or renames."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import NoReturn, TypeVar

from kedro_datasets._typing import TablePreview

from lm_tuning.datasets.entry import HandedDataset, PathDataset
from lm_tuning.errors import UserError
from lm_tuning.json_types import JsonObject
from lm_tuning.storage.atomic import replace_folder, replacing_file, restore_folder
from lm_tuning.storage.folders import FolderStore, StagedFolder
from lm_tuning.storage.write_failures import explain_full_disk

logger = logging.getLogger(__name__)

PREVIEW_NAME = "preview.json"

_Saved = TypeVar("_Saved")
_Loaded = TypeVar("_Loaded")


class _StoreDataset(PathDataset[_Saved, _Loaded]):
    """Base of the two entries of one store: the store itself, and its current folder."""

    def __init__(self, filepath: str, keep: int = 3, metadata: JsonObject | None = None) -> None:
        """Point at a store.

        Args:
            filepath: root of the store; it need not exist.
            keep: number of keys that stay when one is published, the new one included.
            metadata: for plugins and our tracking hook.
        """
        super().__init__(filepath, metadata)
        self._store = FolderStore(self._filepath, keep)


class FolderStoreDataset(_StoreDataset[NoReturn, FolderStore], HandedDataset[FolderStore]):
    """Hand a node the store itself, so that it can look for finished work before it does any.

    Example:
        .. code-block:: yaml

            token_cache:
              type: lm_tuning.datasets.FolderStoreDataset
              filepath: data/05_model_input/default/tokens
    """

    # What a node makes is an output of it, under an entry of its own; here it only looks for what is finished.
    who_writes = "is saved through its StoredFolderDataset entry"

    def load(self) -> FolderStore:
        """Return the store, empty or not."""
        return self._store


class StoredFolderDataset(_StoreDataset[StagedFolder | Path, Path]):
    """Publish a folder of a store, and load the current one as a path.

    A folder with a ``preview.json`` (``columns`` and ``data``) is previewed as a table.

    Example:
        .. code-block:: yaml

            tokenized_examples:
              type: lm_tuning.datasets.StoredFolderDataset
              filepath: data/05_model_input/default/tokens
    """

    def load(self) -> Path:
        """Return the folder that was published last.

        Raises:
            UserError: if there is none, naming entry, path and the pipeline that makes it (as the cause of Kedro's
                ``DatasetError``).
        """
        try:
            return self._store.current()
        except UserError as error:
            raise UserError([*error.problems, self.describe_missing(self._filepath)]) from error

    def save(self, data: StagedFolder | Path) -> None:
        """Publish a staged folder, or make a folder that is already stored the current one."""
        self._store.publish(data)

    def preview(self, nrows: int = 5) -> TablePreview:
        """Return the first rows of the folder's ``preview.json``, if it has one.

        Args:
            nrows: number of rows.
        """
        path = self.load() / PREVIEW_NAME if self._exists() else None
        if path is None or not path.is_file():
            return None
        table = json.loads(path.read_text(encoding="utf-8"))
        rows = table["data"][:nrows]
        return TablePreview({"index": list(range(len(rows))), "columns": table["columns"], "data": rows})

    def _exists(self) -> bool:
        try:
            self._store.current()
        except UserError:
            return False
        return True


class FinishedDataset(PathDataset[Path, Path]):
    """Base of datasets that keep one finished file or folder; a subclass says how it is moved and when it is there."""

    def load(self) -> Path:
        """Return the path.

        Raises:
            UserError: if it is missing, naming entry, path and the pipeline that makes it (as the cause of Kedro's
                ``DatasetError``).
        """
        self.require(self._filepath, self._exists())
        return self._filepath


class FinishedFileDataset(FinishedDataset):
    """Move a finished file, such as a trace, to where it is kept; the previous file stays until then.

    Example:
        .. code-block:: yaml

            profile_trace:
              type: lm_tuning.datasets.FinishedFileDataset
              filepath: data/08_reporting/default/profile/trace.json.gz
    """

    def save(self, data: Path) -> None:
        """Move a file here, also from another disk."""
        # Beside the target first: a move from another disk is a copy, and would be seen half done.
        with replacing_file(self._filepath) as aside:
            shutil.move(data, aside)

    def _exists(self) -> bool:
        return self._filepath.is_file()


class ModelFolderDataset(FinishedDataset):
    """Keep one finished folder, such as a tuned model with its tokenizer, and replace it in one rename.

    Example:
        .. code-block:: yaml

            tuned_model:
              type: lm_tuning.datasets.ModelFolderDataset
              filepath: data/06_models/default/tuned_model
    """

    def save(self, data: Path) -> None:
        """Move a finished folder here; the one that was here stays whole until the new one has taken its place."""
        replace_folder(data, self._filepath)
        logger.info("The model lies in %s.", self._filepath)

    def _exists(self) -> bool:
        restore_folder(self._filepath)  # a killed process may have left the only model under another name
        return self._filepath.is_dir() and any(self._filepath.iterdir())


class FolderDataset(HandedDataset[Path]):
    """Hand a node a folder of its own to work in, such as the one for checkpoints.

    Example:
        .. code-block:: yaml

            checkpoints:
              type: lm_tuning.datasets.FolderDataset
              filepath: data/06_models/default/checkpoints
    """

    who_writes = "is a working folder; nothing is saved to it by name"

    def load(self) -> Path:
        """Return the folder, made if it is absent.

        Raises:
            UserError: the disk is full or takes no files, as the cause of Kedro's ``DatasetError``.
        """
        with explain_full_disk(self._filepath):
            self._filepath.mkdir(parents=True, exist_ok=True)
        return self._filepath
