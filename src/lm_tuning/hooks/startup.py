"""What is put right in Kedro and Kedro-Viz when a command starts: the logging file, and the search for versions."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def use_logging_file(root: Path) -> None:
    """Configure logging by ``conf/logging.yml`` of the project, unless Kedro has done so or the user names another.

    Kedro looks for that file from the working folder alone, and a command may be typed anywhere in the project.

    Args:
        root: the project's folder; log files that it names by a relative path lie below.
    """
    names = (root / "conf" / "logging.yml", root / "conf" / "logging.yaml")
    file = next((name for name in names if name.is_file()), None)
    # Kedro configures logging as soon as this module of it is imported; without it, it is not Kedro that runs.
    project = sys.modules.get("kedro.framework.project")
    if file is None or project is None or os.environ.get("KEDRO_LOGGING_CONFIG") or Path.cwd() == root:
        return
    import yaml

    # Kedro keeps the configuration for processes that it starts, so it goes through its own object.
    config = yaml.safe_load(file.read_text(encoding="utf-8"))
    for handler in (config.get("handlers") or {}).values():
        if "filename" in handler:
            handler["filename"] = str(root / handler["filename"])
    project.LOGGING.configure(config)


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
