"""A real file system of a few hundred kilobytes, so that a disk is really full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """Mount one on an empty folder, or skip the test where this user may not mount.

    Args:
        folder: where; it is made.
        size: as ``mount`` takes it, such as ``256k``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        is_mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        is_mounted = False
    if not is_mounted:
        pytest.skip("this user may not mount a small file system")
    try:
        yield folder
    finally:
        # Lazily: weights that a test has read are mapped into this process for as long as something refers to them.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
