"""A fresh copy of this project, and ``kedro run`` in it with the time of each part."""

from __future__ import annotations

import compileall
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from run_parts import read_answer_speeds, read_lines, read_parts, write_logging_file

PROJECT = Path(__file__).resolve().parents[1]
# Where compiled code is kept between processes: in the scratch folder, so that none is there at first.
_CODE_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def copy_project(target: Path) -> None:
    """Copy code and configuration without data and results.

    Args:
        target: the copy's folder; what was there is removed.
    """
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    shutil.copy(PROJECT / "pyproject.toml", target)
    for name in ("conf", "src"):
        left_out = shutil.ignore_patterns("__pycache__", "*.egg-info", "local")
        shutil.copytree(PROJECT / name, target / name, ignore=left_out)
    (target / "conf/local").mkdir(exist_ok=True)
    # An installed package has its byte code; a copy would pay for it in its first run.
    compileall.compile_dir(target / "src", quiet=2)


def environment_of(project: Path) -> dict[str, str]:
    """Return the variables of a process that runs beside or in a copy of the project.

    Args:
        project: the copy.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW_", "KEDRO_"))}
    path = os.pathsep.join(filter(None, [str(project / "src"), kept.get("PYTHONPATH")]))
    code = {name: str(project.parent / "compiled" / name.lower()) for name in _CODE_FOLDERS}
    return kept | code | {"PYTHONPATH": path, "DO_NOT_TRACK": "true", "HF_HUB_OFFLINE": "1", "COLUMNS": "160"}


def forget_compiled_code(project: Path) -> None:
    """Remove the compiled code that runs in a copy have left.

    Args:
        project: the copy.
    """
    shutil.rmtree(project.parent / "compiled", ignore_errors=True)


def run_project(
    project: Path, *, pipelines: str | None, env: str | None, settings: Mapping[str, Any], name: str, timeout: float
) -> dict[str, Any]:
    """Run Kedro in a copy and return what the run came to.

    Args:
        project: the copy.
        pipelines: names, ``None`` for the whole job.
        env: the recipe.
        settings: by dotted key.
        name: of the run, for its logs beside the copy.
        timeout: seconds after which it is stopped; the parts until then are returned.

    Raises:
        SystemExit: the run failed, with the end of what it said.
    """
    log, screen = (project.parent / f"{name}{ending}" for ending in (".timed.log", ".log"))
    log.unlink(missing_ok=True)
    configuration = project.parent / "logging_timed.yml"
    write_logging_file(project / "conf/logging.yml", configuration, log)
    pairs = ",".join(f"{key}={'null' if value is None else value}" for key, value in settings.items())
    command = [sys.executable, "-m", "kedro", "run", "--params", pairs]
    command += ["--env", env] if env else []
    command += ["--pipelines", pipelines] if pipelines else []
    variables = environment_of(project) | {"KEDRO_LOGGING_CONFIG": str(configuration)}
    with screen.open("w", encoding="utf-8") as shown:
        began = time.time()
        code = run_to_end(command, timeout, cwd=project, env=variables, stdout=shown, stderr=subprocess.STDOUT)
        ended = time.time()
    if code:
        raise SystemExit(f"kedro run ({name}) ended with {code}:\n{screen.read_text(errors='replace')[-4000:]}")
    lines = read_lines(log)
    found = read_results(project, str(_output_of(env, settings))) if code == 0 and pipelines is None else {}
    parts = read_parts(lines, began=began, ended=ended, step_seconds=found.get("step_seconds"))
    return {
        "wall_seconds": ended - began,
        "is_whole": code == 0,
        "parts": parts,
        "answer_tokens_per_second": read_answer_speeds(lines, parts),
        **found,
    }


def run_to_end(command: list[str], timeout: float, **options: Any) -> int | None:
    """Run a command in a group of its own, so that the processes which it starts can be stopped with it.

    Args:
        command: with its arguments.
        timeout: seconds after which all of them are stopped.
        options: of ``subprocess.Popen``.

    Returns:
        The exit code, ``None`` where it was stopped.
    """
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _output_of(env: str | None, settings: Mapping[str, Any]) -> Any:
    """Return the name of the results' folders: every recipe has its own, which is the recipe's name."""
    return settings.get("output") or env or "default"


def read_results(project: Path, output: str) -> dict[str, Any]:
    """Read losses, speed and scores from what a run has stored.

    Args:
        project: the copy.
        output: name of the results' folders.
    """
    reports = project / "data/08_reporting" / output

    def read_json(name: str) -> Any:
        return json.loads((reports / name).read_text(encoding="utf-8"))

    def read_rows(name: str) -> list[dict[str, str]]:
        with (reports / name).open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    steps, efficiency = read_rows("training_summary.csv"), read_rows("efficiency_summary.csv")
    name = next(key for key in steps[0] if key.startswith("loss_nats_per_"))
    losses = [float(row[name]) for row in steps]
    summary, evaluation = read_json("efficiency.json")["efficiency"], read_json("evaluation.json")
    facts = read_json("health.json")["facts"]
    plan = read_json("batch_plan.json")
    return {
        "step_seconds": sum(float(row["seconds"]) for row in efficiency),
        "num_steps": len(steps),
        "num_tokens": sum(int(row["num_tokens"]) for row in efficiency),
        "tokens_per_second": summary["tokens_per_second"],
        "first_loss": losses[0],
        "last_loss": sum(losses[-10:]) / len(losses[-10:]),
        "peak_memory_gib": (summary["peak_memory_bytes"] or 0) / 2**30,
        "planning_seconds": plan.get("seconds"),
        "plan": plan.get("reason"),
        "compile_seconds": facts.get("compile_seconds"),
        "fast_path": facts.get("fast_path"),
        "scores": {
            model: {key: value for key, value in evaluation[model].items() if key in SCORES}
            for model in ("base", "tuned")
        },
        "device": summary["device_name"],
    }


SCORES = ("nats_per_token", "nats_per_row", "rouge_l", "accuracy", "macro_f1")
