"""A copy of this project to run commands in, as a user has it."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def copy_project(folder: Path) -> None:
    """Copy code and configuration, without data, results and credentials.

    Args:
        folder: where to; it is made.
    """
    folder.mkdir()
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copytree(ROOT / "conf", folder / "conf")
    (folder / "conf/local").mkdir(exist_ok=True)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
