"""Store large results in folders named by key, so that the same work is never done twice."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import weakref
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict

from lm_tuning.errors import UserError
from lm_tuning.storage.atomic import replace_folder, restore_folder, sync_folder, write_json_atomic
from lm_tuning.storage.locks import is_alive
from lm_tuning.storage.write_failures import explain_full_disk

#: Raise it when the content of stored folders changes shape: folders of another version are never reused.
SCHEMA_VERSION = 1

MANIFEST_NAME = "manifest.json"
POINTER_NAME = "current.json"
_KEY_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class Manifest(TypedDict):
    """What a folder says of itself.

    Attributes:
        schema_version: see ``SCHEMA_VERSION``.
        key: the folder's name.
        created: UTC, ISO 8601.
        facts: what the maker noted, a record of each store's own, such as ``RowSources``.
        files: size in bytes by name.
    """

    schema_version: int
    key: str
    created: str
    facts: Any
    files: dict[str, int]


class StagedFolder:
    """A folder that is being filled and that nobody else sees yet.

    Used as a context manager it discards itself when the block fails. It also goes when the process ends without
    publishing it, so a failed run leaves nothing half written.

    Attributes:
        path: where to write.
        key: the name that it gets when published.
        facts: the maker's record for the manifest; what ``json.dumps`` takes.
    """

    def __init__(self, path: Path, key: str) -> None:
        """Adopt an empty folder.

        Args:
            path: the folder, which exists.
            key: the key that it will be published under.
        """
        self.path = path
        self.key = key
        self.facts: object = {}
        # Not __del__: a finalizer also runs when the interpreter ends, and knows whether it has run.
        self._discard = weakref.finalize(self, _discard_folder, str(path), os.getpid())

    def discard(self) -> None:
        """Remove the folder, unless it was published."""
        self._discard()

    def __enter__(self) -> StagedFolder:
        """Return itself."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Discard the folder if the block failed; a full disk becomes a message for users.

        Raises:
            UserError: if the block failed because the disk is full.
        """
        if error is not None:
            self.discard()
            with explain_full_disk(self.path.parent / self.key):
                raise error

    def __deepcopy__(self, memo: object) -> StagedFolder:
        """Stay one object: a copy would remove the folder that the original still fills."""
        return self


class FolderStore:
    """Folders by key below one root, with a pointer to the current one.

    Layout: ``<root>/<key>/`` with a ``manifest.json`` that is written last, and ``<root>/current.json``, swapped in one
    rename. A reader holds the old folder or the new one, never a mixture.

    Attributes:
        root: the folder of the store.
        keep: number of keys that stay, the current one included; older ones are removed when one is published.
        made_by: how to make the content, as a user would type it; used in messages.
    """

    def __init__(self, root: Path, keep: int = 3, *, made_by: str = "") -> None:
        """Choose the root without touching the disk.

        Args:
            root: the folder of the store.
            keep: number of keys that stay, at least 1.
            made_by: how to make the content, for messages, such as ``kedro run --pipelines=split``.
        """
        assert keep >= 1, "a store keeps at least the current folder"
        self.root = Path(root)
        self.keep = keep
        self.made_by = made_by

    def find(self, key: str) -> Path | None:
        """Return the complete folder of a key.

        Args:
            key: see ``digest_values``.

        Returns:
            The folder if its manifest names this key and this schema version and every listed file has its listed
            size, else None.
        """
        folder = self.root / key
        return folder if _is_complete(folder, key) else None

    def stage(self, key: str) -> StagedFolder:
        """Make an empty folder to fill; ``publish`` gives it its name.

        Args:
            key: letters, digits, ``.``, ``_`` and ``-``, not starting with a dot or a dash.

        Raises:
            UserError: if the disk is full.
        """
        assert _KEY_PATTERN.fullmatch(key), f"{key!r} is no folder name"
        with explain_full_disk(self.root / key):
            self.root.mkdir(parents=True, exist_ok=True)
            self._remove_stale()
            # With a leading dot, so that no key can be mistaken for it; the process's id tells who still fills it.
            path = self.root / f".staging-{key}-{os.getpid()}-{secrets.token_hex(4)}"
            path.mkdir()
        return StagedFolder(path, key)

    def find_or_make(
        self, key: str, fill: Callable[[StagedFolder], None], *, is_usable: Callable[[Path], bool] = lambda folder: True
    ) -> tuple[StagedFolder | Path, Path]:
        """Find the folder of a key, or fill a new one.

        Args:
            key: see ``digest_values``.
            fill: writes into the empty folder that it is given, and notes the facts for the manifest.
            is_usable: whether a stored folder is what would be written today; any is, unless told otherwise.

        Returns:
            What to hand to ``publish``, a path where the folder was stored; and the folder in which the files lie now.

        Raises:
            UserError: if the disk is full.
            Exception: what ``fill`` raises; of the new folder, and of folders made for it, nothing is left.
        """
        found = self.find(key)
        if found and is_usable(found):
            return found, found
        # A run that fails at its first write leaves no empty folders that look like results.
        made = [folder for folder in (self.root, *self.root.parents) if not folder.exists()]
        try:
            with self.stage(key) as staged:
                fill(staged)
        except BaseException:
            _remove_empty(made)
            raise
        return staged, staged.path

    def publish(self, item: StagedFolder | Path) -> Path:
        """Make a staged folder, or one that ``find`` returned, the current one.

        Args:
            item: a staged folder is completed by its manifest and renamed to its key; a path only moves the pointer.

        Returns:
            The folder under its final name.

        Raises:
            UserError: if the disk is full; the previous folder stays the current one.
        """
        folder = self._finish(item) if isinstance(item, StagedFolder) else Path(item)
        key = folder.name
        assert folder.parent.resolve() == self.root.resolve(), f"'{folder}' does not lie in the store '{self.root}'"
        assert _is_complete(folder, key), f"'{folder}' is not complete"
        os.utime(folder / MANIFEST_NAME)  # the age that pruning goes by is the last use
        write_json_atomic(self.root / POINTER_NAME, {"key": key})
        self._prune(key)
        return folder

    def current(self) -> Path:
        """Return the folder that was published last.

        Raises:
            UserError: if there is none, or its files are damaged, naming the root and what makes it.
        """
        hint = f" Make it with: {self.made_by}" if self.made_by else ""
        key = self._read_pointer()
        if key is None:
            raise UserError(f"Nothing is stored in '{self.root}' yet.{hint}")
        folder = self.root / key
        restore_folder(folder)
        if not _is_complete(folder, key):
            raise UserError(f"The stored folder '{folder}' is missing or damaged.{hint}")
        return folder

    def _read_pointer(self) -> str | None:
        """Return the current key, or None when there is no readable pointer."""
        try:
            key = json.loads((self.root / POINTER_NAME).read_text(encoding="utf-8"))["key"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        # A key from disk becomes a path: one with a slash could lead anywhere.
        return key if isinstance(key, str) and _KEY_PATTERN.fullmatch(key) else None

    def _finish(self, staged: StagedFolder) -> Path:
        """Write the manifest and give the folder its name."""
        target = self.root / staged.key
        with explain_full_disk(target):
            # Written last, after everything else is on disk: a folder with a manifest is whole.
            (staged.path / MANIFEST_NAME).unlink(missing_ok=True)
            manifest: Manifest = {
                "schema_version": SCHEMA_VERSION,
                "key": staged.key,
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
                "facts": staged.facts,
                "files": {
                    path.relative_to(staged.path).as_posix(): path.stat().st_size
                    for path in sorted(staged.path.rglob("*"))
                    if path.is_file()
                },
            }
            sync_folder(staged.path)
            write_json_atomic(staged.path / MANIFEST_NAME, manifest)
        replace_folder(staged.path, target)
        staged._discard.detach()  # the folder has another owner now
        return target

    def _prune(self, current: str) -> None:
        """Remove the keys that were used longest ago, beyond ``keep``."""
        manifests = [path for path in self.root.glob(f"*/{MANIFEST_NAME}") if path.parent.name != current]
        manifests.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for manifest in manifests[self.keep - 1 :]:
            manifest.unlink()  # first, so that a half removed folder is never taken for whole
            shutil.rmtree(manifest.parent, ignore_errors=True)

    def _remove_stale(self) -> None:
        """Remove staged folders whose process is gone."""
        for path in self.root.glob(".staging-*"):
            pid = path.name.rsplit("-", 2)[1]  # keys may hold dashes, the random end does not
            if pid.isdigit() and not is_alive(int(pid)):
                shutil.rmtree(path, ignore_errors=True)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a published folder.

    Args:
        folder: what ``find``, ``publish`` or ``current`` returned.

    Raises:
        UserError: if there is no readable manifest.
    """
    path = Path(folder) / MANIFEST_NAME
    try:
        manifest: Manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"The folder '{folder}' has no readable {MANIFEST_NAME}, so it is not a stored result."
        ) from error
    return manifest


def _is_complete(folder: Path, key: str) -> bool:
    """Return whether the folder holds exactly what its manifest promises."""
    try:
        manifest: Manifest = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
        same = manifest["key"] == key and manifest["schema_version"] == SCHEMA_VERSION
        # Sizes alone: reading gigabytes again for each run to find a damaged disk would cost more than it saves.
        return same and all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _discard_folder(path: str, owner: int) -> None:
    """Remove a staged folder; a forked copy of its owner leaves it alone."""
    # Finalizers are inherited by a fork, such as a loader's worker, and run when it ends.
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders, the innermost first, up to the first that holds something by now."""
    for folder in folders:
        if not folder.is_dir() or any(folder.iterdir()):
            return
        folder.rmdir()
