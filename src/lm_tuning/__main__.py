"""Run the installed package: ``python -m lm_tuning`` is ``kedro run``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kedro.framework.cli.utils import find_run_command
from kedro.framework.project import configure_project


def main(*args: Any, **options: Any) -> Any:
    """Configure the project and hand over to its ``run`` command."""
    package_name = Path(__file__).parent.name
    configure_project(package_name)
    options["standalone_mode"] = not hasattr(sys, "ps1")
    return find_run_command(package_name)(*args, **options)


if __name__ == "__main__":
    main()
