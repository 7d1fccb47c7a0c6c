"""Torch's switches, each proven in a fresh process, since they hold for a whole process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.support.patience import PATIENCE_SECONDS

SCRIPT = """
import json, sys
from dataclasses import asdict
from lm_tuning.runtime.backend import apply_backend, read_backend
settings = json.loads(sys.argv[1])
first = [asdict(fact) for fact in apply_backend(**settings)]
import torch
threads = torch.get_num_threads()
raised = None
try:
    values = torch.ones(4, requires_grad=True)
    torch.nn.functional.max_unpool1d(values.view(1, 1, 4), torch.arange(4).view(1, 1, 4), 1)
except RuntimeError as error:
    raised = "does not have a deterministic implementation" in str(error)
again = [asdict(fact) for fact in apply_backend()]
print(json.dumps([first, threads, raised, again]))
"""


def run_backend(settings: dict[str, object], omp_num_threads: str | None) -> list:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_"))}
    if omp_num_threads is not None:
        environ["OMP_NUM_THREADS"] = omp_num_threads
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(settings)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def values_of(facts: list[dict[str, str]]) -> dict[str, str]:
    return {fact["name"]: fact["value"] for fact in facts}


def test_deterministic_mode_refuses_what_cannot_repeat_and_can_be_left_again() -> None:
    settings = {"reproducibility": "deterministic", "tf32": False, "flash_sdp": False, "num_threads": 1}
    first, threads, raised, again = run_backend(settings, None)
    assert values_of(first) == {
        "torch.num_threads": "1",
        "torch.backends.cuda.matmul.fp32_precision": "ieee",
        "torch.backends.cudnn.conv.fp32_precision": "ieee",
        "torch.backends.cuda.flash_sdp_enabled": "False",
        "torch.backends.cuda.mem_efficient_sdp_enabled": "True",
        "torch.backends.cuda.cudnn_sdp_enabled": "True",
        "torch.backends.cuda.math_sdp_enabled": "True",
        "torch.backends.cudnn.benchmark": "False",
        "torch.backends.cudnn.deterministic": "True",
        "torch.deterministic_algorithms": "True",
    }
    assert threads == 1
    assert raised
    reasons = {fact["name"]: fact["reason"] for fact in first}
    assert reasons["torch.num_threads"] == "environment.num_threads=1"
    assert reasons["torch.deterministic_algorithms"] == "environment.reproducibility=deterministic"
    assert reasons["torch.backends.cudnn.conv.fp32_precision"] == "environment.tf32=false"
    fast = values_of(again)
    assert fast["torch.deterministic_algorithms"] == fast["torch.backends.cudnn.deterministic"] == "False"
    assert fast["torch.backends.cudnn.benchmark"] == "True"
    assert fast["torch.backends.cuda.matmul.fp32_precision"] == "tf32"


def test_the_variable_wins_over_the_parameter() -> None:
    first, threads, raised, _ = run_backend({"num_threads": 1}, "2")
    assert threads == 2
    assert values_of(first)["torch.num_threads"] == "2"
    assert not raised
