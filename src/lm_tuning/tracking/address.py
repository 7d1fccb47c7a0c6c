"""Where runs are kept: an address that MLflow understands, how patient its requests are, and a database made whole.

MLflow makes its tables in some fifty steps. A process that ends in the middle of them leaves a file that no later one
can use or repair, so it is made whole or not at all.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lm_tuning.errors import UserError
from lm_tuning.tracking.trouble import strip_passwords

#: MLflow tries a request eight times, and waits for each up to two minutes. The sender tries again by itself, and what
#: the user has set wins.
REQUEST_LIMITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
_DATABRICKS = ("databricks", "databricks-uc", "uc")
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")


def check_address(uri: str, source: str) -> None:
    """Refuse an address that no store can have.

    Args:
        uri: the tracking URI.
        source: where it was set, for the message.

    Raises:
        UserError: the scheme is none that MLflow knows, it is a folder, or a server's address lacks its host.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.tracking._tracking_service import utils

    stores: Any = utils._tracking_store_registry
    shown = strip_passwords(uri)
    fix = "Take http://host:5000 for a server or sqlite:////folder/mlflow.db for a file."
    # The builder is looked up and not called, so nothing is asked of the store.
    try:
        stores.get_store_builder(uri)
    except MlflowException as error:
        raise UserError(f"{source} = {shown!r} is no address of a tracking store that MLflow knows. {fix}") from error
    parts = urlsplit(uri)
    is_folder = parts.scheme in {"", "file"} and uri not in _DATABRICKS
    if is_folder and os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() not in {"true", "1"}:
        raise UserError(f"{source} = {shown!r} means a folder, which MLflow takes no runs in any more. {fix}")
    if parts.scheme in {"http", "https"}:
        try:
            is_whole = bool(parts.hostname) and (parts.port is None or parts.port > 0)
        except ValueError:  # a port that is no number
            is_whole = False
        if not is_whole:
            raise UserError(f"{source} = {shown!r} names no host, or a port that is no number. {fix}")


def is_database(uri: str) -> bool:
    """Return whether runs go straight to a database, and not to a server before it."""
    return urlsplit(uri).scheme.split("+")[0] in _DATABASES


def lock_name(uri: str) -> str:
    """Return the name of the lock for whoever makes the tables of a database."""
    # An address holds characters that file names may not have, and is longer than some of them may be.
    return f"mlflow-{hashlib.sha256(strip_passwords(uri).encode()).hexdigest()[:12]}.lock"


def choose_address(stored: str, configured: str) -> str:
    """Return the address to send to: as it is configured now, with its password, if it is the one that was stored.

    Args:
        stored: of the journal, without user and password.
        configured: of this project and this environment.
    """
    return configured if strip_passwords(configured) == stored else stored


@contextmanager
def bounded_requests() -> Iterator[None]:
    """Let MLflow give a request up soon, unless the user has set how long it tries."""
    # MLflow reads them at each request. What the block set is taken back, unless somebody has changed it meanwhile.
    ours = {name: value for name, value in REQUEST_LIMITS.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in ours.items():
            if os.environ.get(name) == value:
                del os.environ[name]


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
    # Of processes that were ended while making it; the lock says that nobody is at it now.
    for leftover in path.parent.glob(f".{path.name}.making-*"):
        leftover.unlink(missing_ok=True)
    aside = path.with_name(f".{path.name}.making-{os.getpid()}")
    make_store: Any = sqlalchemy_store.SqlAlchemyStore  # not typed
    store = make_store(f"{_SCHEME}{aside}", DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH)
    store.engine.dispose()  # an open connection would follow the file to its new name, and SQLite's journal would not
    if path.exists():  # made by somebody who does not know the lock, such as MLflow's own server
        aside.unlink()
    else:
        aside.rename(path)


def _file_of(uri: str) -> Path | None:
    """Return the file of a SQLite address; ``None`` for one in memory, with options, or of another kind."""
    name = uri.removeprefix(_SCHEME)
    return Path(name) if uri.startswith(_SCHEME) and name and not name.startswith(":") and "?" not in name else None
