"""Use the project's logging file wherever a command is typed: Kedro looks for it from the working folder alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def use_logging_file(root: Path) -> None:
    """Configure logging by ``conf/logging.yml`` of the project, unless Kedro has done so or the user names another.

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
