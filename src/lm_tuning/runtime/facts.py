"""What a run should be remembered with: code, versions, machine, and the switches it ran under."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lm_tuning.runtime.backend import read_backend
from lm_tuning.runtime.device import current_device, read_processor
from lm_tuning.runtime.threads import Decision
from lm_tuning.secrets import mask_variable

PACKAGES = (
    "lm-tuning torch transformers peft accelerate tokenizers datasets bitsandbytes liger-kernel flash-attn kedro "
    "kedro-mlflow mlflow numpy pyarrow"
).split()
_GIT_TIMEOUT_SECONDS = 20
_GIB = 1 << 30

_decisions: dict[str, Decision] = {}


def run_facts(project: Path | None = None) -> dict[str, str]:
    """Describe code, versions and machine, importing nothing heavy.

    Args:
        project: folder whose git commit counts; the working directory by default.

    Returns:
        Names to texts: ``git.commit`` and ``git.dirty`` (``unknown`` outside a repository), ``version.<package>``,
        ``python``, ``platform``, ``cpu.*``, ``device.*``, and ``torch.num_threads`` when torch is loaded.
    """
    processor = read_processor()
    device = current_device()
    # Tags of MLflow are texts, so all values are.
    facts = read_git(Path.cwd() if project is None else project)
    facts |= {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu.name": processor.name,
        "cpu.cores": str(processor.num_cores),
        "cpu.logical": str(processor.num_logical),
        "device.kind": device.kind,
        "device.name": device.name,
        "device.count": str(device.count),
        "device.memory_gib": f"{device.memory_bytes / _GIB:.1f}",
    }
    for package in PACKAGES:
        try:
            facts[f"version.{package}"] = version(package)
        except PackageNotFoundError:
            continue
    # Only what is loaded anyway is asked: facts of a run that trains nothing must not cost it seconds.
    if "torch" in sys.modules:
        import torch

        facts["torch.num_threads"] = str(torch.get_num_threads())
    return facts


def environment_facts() -> dict[str, str]:
    """Describe what was decided about the environment so far, and how torch's switches stand if torch is loaded.

    Returns:
        ``env.<variable>`` to its value, secrets masked; ``env.set_by_user`` to the names that the user had set;
        ``torch.<switch>`` to what torch reports.
    """
    # What stands in the environment now, which later code may have changed, and not what was decided.
    facts = {
        f"env.{name}": mask_variable(name, os.environ.get(name, decision.value))
        for name, decision in _decisions.items()
    }
    if _decisions:
        users = [name for name, decision in _decisions.items() if decision.source == "user"]
        facts["env.set_by_user"] = ", ".join(users) or "none"
    if "torch" in sys.modules:
        facts |= read_backend()
    return facts


def remember_decisions(decisions: list[Decision]) -> bool:
    """Keep decisions for `environment_facts`.

    Returns:
        Whether they differ from the previous ones, so that they are logged once.
    """
    latest = {decision.name: decision for decision in decisions}
    is_new = latest != _decisions
    _decisions.clear()
    _decisions.update(latest)
    return is_new


def read_git(folder: Path) -> dict[str, str]:
    """Return commit and whether tracked or new files differ from it; ``unknown`` where git cannot tell."""
    commit = _ask_git(folder, "rev-parse", "HEAD")
    # The project's folder alone: it may lie in a larger repository.
    changes = None if commit is None else _ask_git(folder, "status", "--porcelain", "--", ".")
    return {
        "git.commit": commit or "unknown",
        "git.dirty": "unknown" if changes is None else str(bool(changes)).lower(),
    }


def _ask_git(folder: Path, *arguments: str) -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    try:
        answer = subprocess.run(
            [git, "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=_GIT_TIMEOUT_SECONDS,
            # git status refreshes its index otherwise, and takes a lock that an editor may be waiting for.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
