"""Kedro-Viz's search for a later version of itself, which is switched off."""

from __future__ import annotations

import sys


def stop_version_search() -> None:
    """Let the server of Kedro-Viz take its own version for the latest one.

    It asks PyPI at every start, compares the answer as text, and takes no answer for a version named "None": without a
    connection a yellow banner says that "Kedro-Viz None is here". It has no setting for that. The versions of this
    project are those of pyproject.toml in any case.

    Where no such server is starting in this process, nothing is done and nothing is imported.
    """
    # Whoever starts its server has imported it before these settings are read.
    if "kedro_viz.server" not in sys.modules:
        return
    from kedro_viz import __version__
    from kedro_viz.integrations import pypi
    from packaging.version import Version

    def get_own_version() -> Version:
        return Version(__version__)

    pypi.get_latest_version = get_own_version
    # The module that answers the page has taken the function over if it was imported before.
    answering = sys.modules.get("kedro_viz.api.rest.responses.version")
    if answering is not None:
        answering.get_latest_version = get_own_version  # type: ignore[attr-defined]
