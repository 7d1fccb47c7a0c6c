"""A peer's best batch is found and told, and the whole benchmark runs at its tiny size."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.patience import PATIENCE_SECONDS

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/throughput.py"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the peers."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import throughput_peers

    yield throughput_peers


def find_best(
    peers: Any,
    monkeypatch: pytest.MonkeyPatch,
    speeds: dict[int, float | None],
    *,
    batch: int | None = None,
    seconds: float = math.inf,
    name: str = "trainer",
) -> dict[str, Any]:
    """Look for the best batch where each size has a speed; ``None`` runs out of memory."""
    import torch
    from throughput_works import WORKS

    def measure(peer: Any, examples: Any, rows: int, options: Any, *, seconds: float) -> dict[str, Any]:
        speed = speeds[rows]
        if speed is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"batch": rows, "tokens_per_second": speed, "memory_gb": None}

    monkeypatch.setattr(peers, "measure", measure)
    peer = peers.Peer(name, WORKS["4b-lora"], Path("nowhere"))
    best: dict[str, Any] = peers.find_best(peer, argparse.Namespace(batch=batch, seconds=seconds, lengths="report"))
    return best


@pytest.mark.parametrize(
    ("speeds", "best", "outcomes"),
    [
        ({16: 5.0, 32: 8.0, 64: None}, 32, [16, 32, 64]),
        ({16: 5.0, 32: 8.0, 64: 7.0}, 32, [16, 32, 64]),
        ({16: 8.0, 32: 7.9, 64: 8.5, 128: 8.4, 256: 9.0}, 256, [16, 32, 64, 128, 256]),
        ({16: None, 8: None, 4: 3.0}, 4, [16, 8, 4]),
    ],
    ids=["memory", "slower", "all sizes", "halved"],
)
def test_rows_are_doubled_until_memory_or_speed_ends(
    peers: Any, monkeypatch: pytest.MonkeyPatch, speeds: dict[int, float | None], best: int, outcomes: Sequence[int]
) -> None:
    found = find_best(peers, monkeypatch, speeds)
    assert found["batch"] == best
    assert [size["rows"] for size in found["tried"]] == outcomes
    assert [size["rows"] for size in found["tried"] if size.get("outcome") == "out of memory"] == [
        rows for rows, speed in speeds.items() if speed is None
    ]


def test_a_given_batch_and_the_slow_setting_are_measured_alone(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_best(peers, monkeypatch, {24: 5.0}, batch=24)["batch"] == 24
    assert find_best(peers, monkeypatch, {16: 5.0}, name="slow")["tried"] == [
        {"rows": 16, "tokens_per_second": 5.0, "memory_gb": None}
    ]
    with pytest.raises(RuntimeError, match="not even a batch of 24 rows"):
        find_best(peers, monkeypatch, {24: None}, batch=24)


def test_no_size_is_begun_after_the_time(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_best(peers, monkeypatch, {16: 5.0}, seconds=0.0)
    assert found["tried"][1] == {"rows": 32, "outcome": "not tried: 0 s had passed"}


def test_other_errors_are_none_of_memory(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError):
        find_best(peers, monkeypatch, {})


def test_the_sizes_of_known_models_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import torch
    from throughput_works import SHAPES, WORKS, make_config
    from transformers import Qwen3ForCausalLM

    for name in ("tiny", "135m", "8b"):  # the last one has a head of its own
        shape = SHAPES[name]
        with torch.device("meta"):
            model = Qwen3ForCausalLM(make_config(name))
        matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)
        embedding = 0 if shape.tied else shape.vocabulary * shape.hidden
        assert shape.num_matrix_weights(shape.vocabulary) == matrices - embedding, name
    lora, full, classes = (WORKS[f"135m-{kind}"].flops_per_token for kind in ("lora", "full", "lora-classes"))
    assert full * 4 == lora * 6
    assert lora - classes == 4 * SHAPES["135m"].vocabulary * SHAPES["135m"].hidden


@pytest.mark.slow
def test_tiny_works_run_and_what_is_missing_is_left_out_with_a_word(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--tiny", "--out", str(tmp_path / "out.jsonl"), "--timeout", "900"]
    command += ["--works", "tiny-lora", "tiny-lora-classes", "--frameworks", "ours", "trainer", "unsloth"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    runs = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(run["work"], run["framework"]) for run in runs] == [
        (work, framework) for work in ("tiny-lora", "tiny-lora-classes") for framework in ("ours", "trainer")
    ]
    for run in runs:
        expected = math.log(7 if "classes" in run["work"] else 512)
        assert run["losses"][0] == pytest.approx(expected, rel=0.05)
        assert run["tokens_per_second"] > 0
    assert "tiny-lora-classes unsloth: left out, " in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith("| tiny-lora | ")]
    assert rows[0].endswith(f" {runs[0]['tokens_per_second'] / runs[1]['tokens_per_second']:.2f} x |")
    assert len(rows) == 3
