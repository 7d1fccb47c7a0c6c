"""What Kedro reads before anything else of this project, and so the earliest point for environment variables.

Nothing here may import torch, transformers or MLflow: every command of Kedro comes through.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

from kedro.utils import find_kedro_project

from lm_tuning.hooks.environment import EnvironmentHook
from lm_tuning.hooks.gate import GateHook
from lm_tuning.hooks.locking import EarlierReportsHook, OutputLockHook
from lm_tuning.hooks.parameters import ParametersHook, SecretsHook
from lm_tuning.hooks.tracking import TrackingHook
from lm_tuning.hooks.validation import StoredInputsHook, TrainingStartHook
from lm_tuning.runtime.log_records import install_log_records
from lm_tuning.runtime.threads import collect_rarely


def _use_logging_file(root: Path) -> None:
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


def _stop_version_search() -> None:
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


# Before the heavy imports that follow, which it speeds up.
collect_rarely()

# Whichever logging file is in use, no text of a row is taken for console markup and no password is printed.
install_log_records()

_ROOT = Path(find_kedro_project(Path.cwd()) or Path(__file__).resolve().parents[2])

_use_logging_file(_ROOT)

# What the user has set in the shell wins, always.
for _name, _value in {
    # MLflow refuses its old folder store; an absolute path, since a relative one would follow the working directory.
    "MLFLOW_TRACKING_URI": f"sqlite:///{_ROOT / 'mlflow.db'}",
    # GitPython, which MLflow imports, warns at length where git is not installed.
    "GIT_PYTHON_REFRESH": "quiet",
    # Kedro, MLflow and the Hugging Face libraries send usage data unless told otherwise.
    "DO_NOT_TRACK": "true",
    "KEDRO_DISABLE_TELEMETRY": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # Progress is shown in one place, by this project.
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    # Plots are files; a display is neither needed nor always there.
    "MPLBACKEND": "agg",
}.items():
    os.environ.setdefault(_name, _value)

# Two warnings of packages about each other that would come with every command and that no user could fix. MLflow
# switches warning filters off for its own, so that one is caught where Kedro logs it.
warnings.filterwarnings("ignore", message=r"register_new_resolver\(\) is deprecated")
logging.getLogger("py.warnings").addFilter(lambda record: "Add type hints to the `predict`" not in record.getMessage())

# Overlays change single keys and keep the rest of a group.
CONFIG_LOADER_ARGS = {
    "base_env": "base",
    "default_run_env": "local",
    "merge_strategy": {"parameters": "soft", "mlflow": "soft", "globals": "soft"},
    "config_patterns": {"mlflow": ["mlflow*", "mlflow*/**"]},
}

# Of hooks that ask to be first, the last one registered comes first: parameters are checked before anything uses them.
HOOKS = (
    GateHook(),
    EarlierReportsHook(),
    TrackingHook(),
    OutputLockHook(),
    TrainingStartHook(),
    StoredInputsHook(),
    EnvironmentHook(),
    SecretsHook(),
    ParametersHook(),
)

# The tracking hook takes the place of the plugin's own; with both, every run would be logged twice.
DISABLE_HOOKS_FOR_PLUGINS = ("kedro_mlflow",)

_stop_version_search()
