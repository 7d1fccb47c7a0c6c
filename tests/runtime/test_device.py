"""Which device is found, without torch and with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lm_tuning.runtime import device
from lm_tuning.runtime.device import describe_device, probe_device, torch_cuda_version
from lm_tuning.runtime.nvml import Card


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim that the installed torch was built with CUDA."""
    monkeypatch.setattr(device, "torch_cuda_version", lambda: "13.0")


def add_cards(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    cards = [Card("NVIDIA Something", 80 << 30, capability) for capability in capabilities]
    monkeypatch.setattr(device, "list_cards", lambda: cards)


def test_probe_and_torch_agree_on_the_kind() -> None:
    probed, described = probe_device(), describe_device()
    assert (probed.kind, probed.cores, probed.supports_bf16) == (
        described.kind,
        described.cores,
        described.supports_bf16,
    )


def test_probing_imports_nothing_that_takes_long() -> None:
    script = (
        "import json, sys\n"
        "from lm_tuning.runtime.device import probe_device\n"
        "from lm_tuning.runtime.facts import run_facts, environment_facts\n"
        "probe_device(); run_facts(); environment_facts()\n"
        "print(json.dumps(sorted({'torch', 'numpy', 'transformers', 'kedro', 'mlflow'} & set(sys.modules))))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == []


def test_the_cuda_version_is_read_without_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert torch_cuda_version() == torch.version.cuda
    for text, expected in (("cuda: Optional[str] = '13.0'\n", "13.0"), ("cuda = None\n", None)):
        package = tmp_path / str(expected) / "torch"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "version.py").write_text(f"__version__ = '2.11.0'\n{text}hip: Optional[str] = None\n")
        monkeypatch.delitem(sys.modules, "torch")
        monkeypatch.syspath_prepend(package.parent)
        assert torch_cuda_version() == expected
        monkeypatch.setitem(sys.modules, "torch", torch)


@pytest.mark.usefixtures("cuda_build")
def test_bfloat16_needs_ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    add_cards(monkeypatch, (9, 0))
    found = probe_device({})
    assert (found.kind, found.count, found.memory_bytes, found.supports_bf16) == ("cuda", 1, 80 << 30, True)
    add_cards(monkeypatch, (7, 5))
    assert not probe_device({}).supports_bf16


@pytest.mark.usefixtures("cuda_build")
@pytest.mark.parametrize(
    ("visible", "kind", "count"),
    [
        (None, "cuda", 2),
        ("1", "cuda", 1),
        ("0,1", "cuda", 2),
        ("0,-1,1", "cuda", 1),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "cuda", 1),
        ("", "cpu", 1),
        ("-1", "cpu", 1),
    ],
)
def test_hidden_cards_do_not_count(monkeypatch: pytest.MonkeyPatch, visible: str | None, kind: str, count: int) -> None:
    add_cards(monkeypatch, (9, 0), (9, 0))
    found = probe_device({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert (found.kind, found.count) == (kind, count)


@pytest.mark.usefixtures("cuda_build")
def test_without_the_driver_s_library_its_files_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    add_cards(monkeypatch)
    assert probe_device({}, tmp_path).kind != "cuda"
    folder = tmp_path / "proc/driver/nvidia/gpus/0000:00:04.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 11\n")
    found = probe_device({}, tmp_path)
    assert (found.kind, found.name, found.supports_bf16) == ("cuda", "NVIDIA H100 80GB HBM3", False)


def test_a_cpu_build_of_torch_does_not_see_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    add_cards(monkeypatch, (9, 0))
    monkeypatch.setattr(device, "torch_cuda_version", lambda: None)
    assert probe_device({}).kind != "cuda"
