"""What ``kedro send-tracking`` does: find the tracking store of this project, and send to it what runs have kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lm_tuning.hooks.locking import LOCK_FOLDER
from lm_tuning.tracking.journal import JOURNAL_FOLDER, list_journals


def send_what_is_kept(root: Path, env: str | None, *, say: Callable[[str], None]) -> list[str]:
    """Send every journal of a project to MLflow.

    Args:
        root: project folder.
        env: configuration environment; None takes ``KEDRO_ENV`` or the default.
        say: receives what was sent, a line each.

    Returns:
        What stays, and why.

    Raises:
        UserError: ``mlflow.yml`` is wrong, or the address of the store is none.
    """
    from kedro.framework.session import KedroSession

    from lm_tuning.tracking.later import send_journals

    # Before a session, which imports MLflow: most of the time there is nothing to send.
    if not list_journals(root / JOURNAL_FOLDER):
        say("Nothing is kept: every run has told MLflow everything.")
        return []
    with KedroSession.create(project_path=root, env=env or os.environ.get("KEDRO_ENV")) as session:
        context: Any = session.load_context()  # type: ignore[attr-defined]  # only its subclass declares it
        config = context.mlflow  # by our tracking hook, which sets MLflow up, with credentials
    uri = str(config.server.mlflow_tracking_uri)
    return send_journals(root / JOURNAL_FOLDER, uri, locks=root / LOCK_FOLDER, say=say)
