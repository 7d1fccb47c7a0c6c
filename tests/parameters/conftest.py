from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kedro.config import OmegaConfigLoader

from lm_tuning.parameters import Parameters
from lm_tuning.parameters.loading import load_parameters

REPOSITORY = Path(__file__).resolve().parents[2]
LOADER_ARGUMENTS = {
    "base_env": "base",
    "default_run_env": "local",
    "merge_strategy": {"parameters": "soft", "mlflow": "soft", "globals": "soft"},
}


@pytest.fixture
def valid() -> dict[str, Any]:
    """The smallest parameters that are valid: what has no default that would do."""
    return {"train": {"effective_batch_tokens": 512, "max_steps": 40}}


class Project:
    """A project folder with the real base parameters, and overlays that tests write."""

    def __init__(self, root: Path) -> None:
        self.root = root
        base = root / "conf" / "base"
        base.mkdir(parents=True)
        (root / "conf" / "local").mkdir()
        for file in (REPOSITORY / "conf" / "base").glob("*.yml"):
            if file.name.startswith(("parameters", "globals")):
                shutil.copy(file, base)

    def write(self, name: str, content: Any) -> Path:
        path = self.root / "conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
        return path

    def loader(self, env: str | None = None, **runtime: Any) -> OmegaConfigLoader:
        conf = str(self.root / "conf")
        return OmegaConfigLoader(conf_source=conf, env=env, runtime_params=runtime, **LOADER_ARGUMENTS)

    def load(self, env: str | None = None, **runtime: Any) -> Parameters:
        return load_parameters(self.loader(env, **runtime), self.root)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.fixture
def problems_of() -> Callable[..., list[str]]:
    """Call something that must refuse, and return the sentences it gives."""

    def call(function: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
        from lm_tuning.errors import UserError

        with pytest.raises(UserError) as caught:
            function(*args, **options)
        return caught.value.problems

    return call
