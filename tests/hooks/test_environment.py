"""The environment hook, proven by what a fresh process reads back from torch after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.runtime.device import read_processor
from tests.support.patience import PATIENCE_SECONDS

# Runs a real Kedro context and pipeline with only this hook. The nodes report what their process is like.
SCRIPT = """
import json, logging, os, sys
from pathlib import Path
if "import torch first" in sys.argv: import torch
if "claim a card" in sys.argv:
    import lm_tuning.hooks.environment as module
    from lm_tuning.runtime.device import Device
    module.probe_device = lambda: Device("cuda", "NVIDIA Broken", 1, 0, True, 2)
from kedro.config import OmegaConfigLoader
from kedro.framework.context import KedroContext
from kedro.framework.hooks.manager import _create_hook_manager
from kedro.pipeline import Pipeline, node
from kedro.runner import SequentialRunner
from lm_tuning.hooks.environment import EnvironmentHook

log = logging.getLogger("lm_tuning")
log.setLevel(logging.INFO)
log.propagate = False
log.addHandler(logging.StreamHandler(sys.stderr))
log.handlers[0].setFormatter(logging.Formatter("%(levelname)s %(message)s"))

def inspect_variables():
    assert "torch" not in sys.modules or "import torch first" in sys.argv
    REPORT["variables"] = {name: os.environ.get(name) for name in NAMES}
    return "done"

def inspect_tokenizers(variables):
    REPORT["tokenizers"] = os.environ.get("TOKENIZERS_PARALLELISM")
    return "done"

def inspect_torch(tokenizers):
    import torch
    info = torch.__config__.parallel_info()
    found = lambda name: int(info.split(name)[1].split(":")[1].split()[0])
    REPORT["torch"] = {
        "num_threads": torch.get_num_threads(),
        "omp": found("omp_get_max_threads()"),
        "mkl": found("mkl_get_max_threads()") if torch.backends.mkl.is_available() else None,
        "matmul": torch.backends.cuda.matmul.fp32_precision,
        "conv": torch.backends.cudnn.conv.fp32_precision,
        "cpu": torch.backends.mkldnn.matmul.fp32_precision,
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "mem_efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "compiler_loaded": "torch._inductor.config" in sys.modules,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "tokenizers": os.environ.get("TOKENIZERS_PARALLELISM"),
    }
    return "done"

REPORT = {}
NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_THREADING_LAYER", "MKL_SERVICE_FORCE_INTEL",
         "TOKENIZERS_PARALLELISM", "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_ALLOC_CONF", "EXTRA")
project = Path.cwd()
loader = OmegaConfigLoader(conf_source=str(project / "conf"), base_env="base", default_run_env="base",
                           runtime_params=json.loads(sys.argv[1]))
manager = _create_hook_manager()
manager.register(EnvironmentHook())
context = KedroContext(project, loader, "base", "lm_tuning", manager)
manager.hook.after_context_created(context=context)
pipeline = Pipeline([
    node(inspect_variables, None, "variables", name="inspect_variables"),
    node(inspect_tokenizers, "variables", "tokenizers", name="inspect_tokenizers", tags="tokenizers"),
    node(inspect_torch, "tokenizers", "torch", name="inspect_torch", tags="torch"),
    node(inspect_torch, "torch", "again", name="inspect_again", tags="torch"),
])
catalog = context.catalog
SequentialRunner().run(pipeline, catalog, hook_manager=manager)
from lm_tuning.runtime.facts import environment_facts
print(json.dumps(REPORT | {"facts": environment_facts()}))
"""


def run_project(
    folder: Path, environment: dict[str, Any], *, variables: dict[str, str] | None = None, argument: str = ""
) -> tuple[dict[str, Any], str]:
    """Run the script in a fresh process; return what it printed and what it logged."""
    (folder / "conf" / "base").mkdir(parents=True)
    (folder / "conf" / "base" / "parameters.yml").write_text(
        "environment: {}\ntrain: {max_steps: 1, effective_batch_rows: 1}\n", encoding="utf-8"
    )
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_", "LM_TUNING_SET"))
    }
    clean.pop("TOKENIZERS_PARALLELISM", None)
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps({"environment": environment}), argument],
        cwd=folder,
        env=clean | {"CUDA_VISIBLE_DEVICES": ""} | (variables or {}),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1]), result.stderr


def test_a_fresh_process_runs_with_what_was_decided(tmp_path: Path) -> None:
    report, log = run_project(tmp_path, {"num_threads": 1, "variables": {"EXTRA": "yes"}})
    assert report["variables"]["OMP_NUM_THREADS"] == report["variables"]["MKL_NUM_THREADS"] == "1"
    assert report["variables"]["EXTRA"] == "yes"
    assert report["variables"]["CUBLAS_WORKSPACE_CONFIG"] is None
    assert report["variables"]["TOKENIZERS_PARALLELISM"] == "false"
    assert report["tokenizers"] == "true"
    torch = report["torch"]
    assert torch["num_threads"] == torch["omp"] == 1
    assert torch["mkl"] in (1, None)
    assert torch["matmul"] == torch["conv"] == "tf32"
    assert torch["cpu"] != "tf32", "TF32 is for the card alone"
    assert torch["flash"] and torch["mem_efficient"] and torch["benchmark"]
    assert not torch["deterministic"]
    assert not torch["compiler_loaded"], "torch's compiler takes seconds to import"
    assert torch["tokenizers"] == "false", "parallel tokenizing ends with its node"
    assert report["facts"]["env.OMP_NUM_THREADS"] == "1"
    assert report["facts"]["env.set_by_user"] == "none"
    assert report["facts"]["torch.num_threads"] == "1"
    assert report["facts"]["torch.backends.cuda.matmul.fp32_precision"] == "tf32"
    assert log.count("OMP_NUM_THREADS=1 MKL_NUM_THREADS=1: environment.num_threads asks for it") == 1
    assert log.count("reports:") == 1, "torch's switches are set and logged once, however many nodes use torch"
    assert "WARNING" not in log


def test_what_the_user_has_set_wins_and_the_log_says_so(tmp_path: Path) -> None:
    users = {
        "OMP_NUM_THREADS": "1",
        "MKL_THREADING_LAYER": "SEQUENTIAL",
        "MKL_SERVICE_FORCE_INTEL": "0",
        "TOKENIZERS_PARALLELISM": "true",
        "EXTRA": "mine",
    }
    report, log = run_project(tmp_path, {"num_threads": 2, "variables": {"EXTRA": "yours"}}, variables=users)
    assert {name: report["variables"][name] for name in users} == users
    assert report["variables"]["MKL_NUM_THREADS"] == "1", "both libraries use the same count"
    assert report["torch"]["num_threads"] == report["torch"]["omp"] == 1
    assert report["torch"]["tokenizers"] == report["tokenizers"] == "true"
    assert set(report["facts"]["env.set_by_user"].split(", ")) == set(users)
    assert "OMP_NUM_THREADS=1: set by you, which wins over environment.num_threads=2" in log


def test_deterministic_mode_with_every_switch_off_on_all_cores(tmp_path: Path) -> None:
    off = {"tf32": False, "flash_sdp": False, "mem_efficient_sdp": False}
    report, _ = run_project(tmp_path, {"reproducibility": "deterministic", **off})
    assert report["variables"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8", "set before torch was imported"
    torch = report["torch"]
    assert torch["deterministic"] and torch["cudnn_deterministic"]
    assert not torch["benchmark"]
    assert torch["matmul"] == torch["conv"] == "ieee"
    assert not torch["flash"] and not torch["mem_efficient"]
    assert torch["num_threads"] == torch["omp"] == read_processor().num_cores


def test_torch_imported_too_early_is_warned_about_and_threads_are_set_all_the_same(tmp_path: Path) -> None:
    report, log = run_project(tmp_path, {"num_threads": 1}, argument="import torch first")
    assert "WARNING" in log and "torch was imported before the environment was set" in log
    assert "OMP_NUM_THREADS" in log.split("too late for this process")[1].splitlines()[0]
    assert report["torch"]["num_threads"] == 1


def test_a_card_that_torch_cannot_use_leaves_the_training_to_all_cores(tmp_path: Path) -> None:
    report, log = run_project(tmp_path, {}, argument="claim a card")
    assert report["variables"]["OMP_NUM_THREADS"] == "1", "right beside a card"
    assert "WARNING The driver shows a graphics card, but torch" in log
    assert report["torch"]["num_threads"] == report["torch"]["omp"] == read_processor().num_cores
    assert report["facts"]["env.OMP_NUM_THREADS"] == str(read_processor().num_cores)
    assert "env.PYTORCH_ALLOC_CONF" not in report["facts"]


@pytest.mark.gpu
def test_a_card_gets_one_thread_and_growing_segments(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    report, _ = run_project(tmp_path, {}, variables={"CUDA_VISIBLE_DEVICES": "0"})
    assert report["torch"]["num_threads"] == 1
    assert report["variables"]["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
