"""Which variables are decided on, by device and by what the user has set. Their effect: hooks/test_environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from lm_tuning.runtime.threads import (
    MARKER,
    Decision,
    apply_variables,
    find_openmp,
    plan_variables,
    summarize_decisions,
    tokenizer_parallelism,
)


def plan(**options: object) -> dict[str, Decision]:
    settings: dict[str, object] = {"device_kind": "cpu", "cores": 6, "openmp": "gnu", "environ": {}}
    return {decision.name: decision for decision in plan_variables(**settings | options)}  # type: ignore[arg-type]


def values(decisions: dict[str, Decision]) -> dict[str, str]:
    return {name: decision.value for name, decision in decisions.items()}


def test_a_cpu_trains_on_all_cores_and_a_card_leaves_them_to_its_workers() -> None:
    assert values(plan()) == {
        "OMP_NUM_THREADS": "6",
        "MKL_NUM_THREADS": "6",
        "MKL_THREADING_LAYER": "GNU",
        "MKL_SERVICE_FORCE_INTEL": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    on_card = plan(device_kind="cuda")
    assert (on_card["OMP_NUM_THREADS"].value, on_card["MKL_NUM_THREADS"].value) == ("1", "1")
    if sys.platform == "linux":
        assert on_card["PYTORCH_ALLOC_CONF"].value == "expandable_segments:True"
    assert all(decision.reason for decision in on_card.values())


def test_the_layer_follows_the_openmp_that_torch_brings() -> None:
    assert plan(openmp="intel")["MKL_THREADING_LAYER"].value == "INTEL"
    assert "MKL_THREADING_LAYER" not in plan(openmp=None)
    assert "MKL_SERVICE_FORCE_INTEL" not in plan(machine="aarch64")


def test_deterministic_mode_fixes_the_workspace_of_cublas() -> None:
    decided = values(plan(reproducibility="deterministic"))
    assert (decided["CUBLAS_WORKSPACE_CONFIG"], decided["FLASH_ATTENTION_DETERMINISTIC"]) == (":4096:8", "1")
    users = plan(reproducibility="deterministic", environ={"CUBLAS_WORKSPACE_CONFIG": ":0:0"})
    assert ":4096:8 or :16:8" in users["CUBLAS_WORKSPACE_CONFIG"].reason


def test_one_count_for_both_libraries_whichever_is_given() -> None:
    assert plan(num_threads=3)["MKL_NUM_THREADS"].value == "3"
    for name, other in (("OMP_NUM_THREADS", "MKL_NUM_THREADS"), ("MKL_NUM_THREADS", "OMP_NUM_THREADS")):
        decided = plan(num_threads=3, environ={name: "2,1"})
        assert decided[name] == Decision(name, "2,1", decided[name].reason, "user")
        assert (decided[other].value, decided[other].source) == ("2", "lm_tuning")
    assert plan(extra={"OMP_NUM_THREADS": "5"})["MKL_NUM_THREADS"].value == "5"


def test_extra_variables_give_way_to_the_user_and_replace_ours() -> None:
    decided = plan(extra={"TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "INFO"}, environ={"NCCL_DEBUG": "WARN"})
    assert decided["TOKENIZERS_PARALLELISM"].value == "true"
    assert (decided["NCCL_DEBUG"].value, decided["NCCL_DEBUG"].source) == ("WARN", "user")


def test_the_old_name_of_the_allocator_s_variable_is_respected() -> None:
    decided = plan(device_kind="cuda", environ={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})
    assert "PYTORCH_ALLOC_CONF" not in decided
    assert decided["PYTORCH_CUDA_ALLOC_CONF"].source == "user"


def test_a_later_session_changes_what_the_first_has_set() -> None:
    environ = {"OMP_NUM_THREADS": "2"}
    apply_variables(list(plan(reproducibility="deterministic", environ=environ).values()), environ)
    assert environ["MKL_NUM_THREADS"] == "2"
    assert environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    environ["MKL_THREADING_LAYER"] = "SEQUENTIAL"  # the user, in between

    second = plan(num_threads=4, environ=environ)
    assert second["OMP_NUM_THREADS"].source == "user"
    assert second["MKL_NUM_THREADS"].source == "lm_tuning"
    assert (second["MKL_THREADING_LAYER"].value, second["MKL_THREADING_LAYER"].source) == ("SEQUENTIAL", "user")
    changed = apply_variables(list(second.values()), environ)
    assert "CUBLAS_WORKSPACE_CONFIG" not in environ
    assert "CUBLAS_WORKSPACE_CONFIG" in changed
    assert environ["MKL_THREADING_LAYER"] == "SEQUENTIAL"
    assert apply_variables(list(plan(num_threads=4, environ=environ).values()), environ) == []


def test_children_inherit_values_and_know_whose_they_are() -> None:
    environ = dict(os.environ) | {"OMP_NUM_THREADS": "2"}
    for name in ("MKL_NUM_THREADS", "MKL_THREADING_LAYER", "MKL_SERVICE_FORCE_INTEL", MARKER):
        environ.pop(name, None)
    apply_variables(list(plan(environ=environ).values()), environ)
    script = (
        "import json, os\n"
        "from lm_tuning.runtime.threads import plan_variables\n"
        "plan = plan_variables(device_kind='cpu', cores=1, openmp='gnu')\n"
        "print(json.dumps({decision.name: [os.environ[decision.name], decision.source] for decision in plan}))"
    )
    result = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)
    inherited = json.loads(result.stdout)
    assert inherited["OMP_NUM_THREADS"] == ["2", "user"]
    assert inherited["MKL_THREADING_LAYER"] == ["GNU", "lm_tuning"]
    assert inherited["MKL_SERVICE_FORCE_INTEL"] == ["1", "lm_tuning"]


def test_parallel_tokenizing_is_for_the_block_only() -> None:
    environ: dict[str, str] = {}
    apply_variables(list(plan(environ=environ).values()), environ)
    with pytest.raises(RuntimeError), tokenizer_parallelism(True, environ):
        assert environ["TOKENIZERS_PARALLELISM"] == "true"
        with tokenizer_parallelism(False, environ):
            assert environ["TOKENIZERS_PARALLELISM"] == "false"
        assert environ["TOKENIZERS_PARALLELISM"] == "true"
        raise RuntimeError
    assert environ["TOKENIZERS_PARALLELISM"] == "false"
    with tokenizer_parallelism(True, users := {"TOKENIZERS_PARALLELISM": "false"}):
        assert users["TOKENIZERS_PARALLELISM"] == "false"
    untouched: dict[str, str] = {}
    with tokenizer_parallelism(True, untouched):
        assert untouched["TOKENIZERS_PARALLELISM"] == "true"
    assert "TOKENIZERS_PARALLELISM" not in untouched


def test_the_log_puts_one_reason_on_one_line() -> None:
    lines = summarize_decisions(plan_variables(device_kind="cpu", cores=6, num_threads=2, environ={}))
    assert lines[0] == "OMP_NUM_THREADS=2 MKL_NUM_THREADS=2: environment.num_threads asks for it"


@pytest.mark.skipif(sys.platform != "linux", reason="wheels of other systems bring other libraries")
def test_the_openmp_library_is_the_one_that_torch_loads() -> None:
    import torch

    torch.zeros(1)
    with open("/proc/self/maps", encoding="utf-8") as maps:
        loaded = maps.read()
    kind = find_openmp()
    assert kind is not None
    assert {"gnu": "libgomp", "intel": "libiomp5", "llvm": "libomp"}[kind] in loaded
