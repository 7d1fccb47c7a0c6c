"""Replace files and folders so that a reader sees the old one or the new one, never half of either."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lm_tuning.storage.write_failures import explain_full_disk


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` and rename it there when the block succeeds.

    The content is forced to disk before the rename. When the block fails, ``path`` keeps what it had.

    Args:
        path: the file to replace; missing parent folders are created.

    Yields:
        The path to write to, with the same suffix.

    Raises:
        UserError: if the disk is full.
    """
    with explain_full_disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, since a rename is atomic within one file system only; with the same suffix, since some
        # writers choose the format by it; with the process's id, since two may write at the same time.
        aside = path.with_name(f".{path.stem}.{os.getpid()}-{secrets.token_hex(4)}{path.suffix}")
        try:
            yield aside
            sync_file(aside)
            os.replace(aside, path)
            sync_file(path.parent)  # the rename itself is on disk only once the folder is
        finally:
            aside.unlink(missing_ok=True)


def write_bytes_atomic(path: Path, content: bytes) -> None:
    """Replace a file by these bytes.

    Raises:
        UserError: if the disk is full; the previous file stays.
    """
    with replacing_file(path) as aside:
        aside.write_bytes(content)


def write_text_atomic(path: Path, text: str) -> None:
    """Replace a file by this text, in UTF-8 and with line ends as they are.

    Raises:
        UserError: if the disk is full; the previous file stays.
    """
    write_bytes_atomic(path, text.encode("utf-8"))


def write_json_atomic(path: Path, value: object, *, indent: int | None = 2) -> None:
    """Replace a file by this value as JSON, in UTF-8 with readable letters.

    Args:
        path: the file to replace.
        value: what ``json.dumps`` takes. It is encoded before the disk is touched.
        indent: spaces a level; None writes one line.

    Raises:
        UserError: if the disk is full; the previous file stays.
    """
    write_text_atomic(path, json.dumps(value, indent=indent, ensure_ascii=False) + "\n")


def replace_folder(source: Path, target: Path) -> None:
    """Move a finished folder to ``target``, in place of the folder that is there.

    The old folder is renamed aside, the new one takes its place, and only then the old one is removed. A process
    that is killed between the two renames leaves the old folder aside: ``restore_folder`` brings it back.

    Args:
        source: the finished folder. From another file system it is copied beside the target first.
        target: where it belongs.

    Raises:
        UserError: if the disk is full; the previous folder stays.
        FileNotFoundError: if ``source`` is not a folder.
    """
    if not source.is_dir():
        raise FileNotFoundError(f"There is no folder '{source}' to move to '{target}'.")
    restore_folder(target)
    with explain_full_disk(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        sync_folder(source)
        # Folders cannot be exchanged in one call everywhere, so there is a moment without one, see restore_folder().
        staged = _bring_beside(source, target)
        aside = target.with_name(f".replaced-{target.name}-{secrets.token_hex(4)}")
        had_old = target.exists()
        if had_old:
            os.rename(target, aside)
        try:
            os.rename(staged, target)
        except BaseException:  # also KeyboardInterrupt: whatever ends it here, the old folder goes back
            if had_old:
                os.rename(aside, target)
            if staged != source:
                shutil.rmtree(staged, ignore_errors=True)
            raise
        sync_file(target.parent)
    if staged != source:
        shutil.rmtree(source, ignore_errors=True)
    if had_old:
        shutil.rmtree(aside, ignore_errors=True)


def restore_folder(target: Path) -> bool:
    """Bring back the folder that a killed ``replace_folder`` left aside.

    Args:
        target: the folder that may be missing.

    Returns:
        Whether a folder was brought back.
    """
    # The newest is the one that was current; others were left by processes that were killed while removing them.
    asides = sorted(target.parent.glob(f".replaced-{target.name}-????????"), key=lambda path: path.stat().st_mtime)
    if not asides:
        return False
    restored = not target.exists()
    if restored:
        os.rename(asides.pop(), target)
    for leftover in asides:
        shutil.rmtree(leftover, ignore_errors=True)
    return restored


def sync_file(path: Path) -> None:
    """Force one file, or the entries of one folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)  # which a folder can be opened with too
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Force every file below a folder, then the folders, to disk."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            path = Path(parent, name)
            if path.is_file() and not path.is_symlink():
                sync_file(path)
        sync_file(Path(parent))


def _bring_beside(source: Path, target: Path) -> Path:
    """Return a folder on the target's file system with the source's content: the source itself where possible."""
    if source.stat().st_dev == target.parent.stat().st_dev:
        return source
    staged = target.with_name(f".incoming-{target.name}-{secrets.token_hex(4)}")
    try:
        staged.mkdir()
        for path in sorted(source.rglob("*")):  # shutil.copytree hides which error it met
            copy = staged / path.relative_to(source)
            if path.is_dir():
                copy.mkdir()
            else:
                shutil.copy2(path, copy)
        sync_folder(staged)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    return staged
