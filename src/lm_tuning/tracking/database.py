"""Make MLflow's SQLite database whole or not at all.

MLflow makes its tables in some fifty steps. A process that ends in the middle of them leaves a file that no later one
can use or repair.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

_SCHEME = "sqlite:///"


def make_database(uri: str) -> None:
    """Make the database of a tracking store aside and rename it, where there is none yet.

    Nobody else may be doing the same: the caller holds the lock for it.

    Args:
        uri: the tracking store; anything but a SQLite file is left alone.
    """
    path = _file_of(uri)
    if path is None or path.exists():
        return
    from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH, sqlalchemy_store

    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{path.name}.making-*"):
        leftover.unlink(missing_ok=True)
    aside = path.with_name(f".{path.name}.making-{os.getpid()}")
    make_store: Any = sqlalchemy_store.SqlAlchemyStore  # not typed
    store = make_store(f"{_SCHEME}{aside}", DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH)
    store.engine.dispose()
    if path.exists():  # made by somebody who does not know the lock, such as MLflow's own server
        aside.unlink()
    else:
        aside.rename(path)


def _file_of(uri: str) -> Path | None:
    """Return the file of a SQLite address; ``None`` for one in memory, with options, or of another kind."""
    name = uri.removeprefix(_SCHEME)
    return Path(name) if uri.startswith(_SCHEME) and name and not name.startswith(":") and "?" not in name else None
