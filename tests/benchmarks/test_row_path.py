"""What a trace of a row counts: on a few functions whose values are known, and in a whole run."""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.patience import PATIENCE_SECONDS

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/row_path.py"

FLOW = """
from dataclasses import dataclass
import torch
from torch.nn.functional import cross_entropy

class Hidden:
    def __init__(self, text):
        self.text = text

    def ask(self):
        return 1

@dataclass
class Row:
    ids: object

    def blind(self, number):
        number += 1

def read(text):
    return {"rows": [{"text": word} for word in text.split()]}

def encode(number, ids):
    return Row(torch.tensor([[0, *ids, 1]]))

def knows_the_number(number):
    return number + 1

class Trainer:
    def training_step(self, row):
        logits = torch.zeros(2, 4, requires_grad=True)
        self.shallow(logits)
        self.deep(logits, row)
        return Loss.apply(logits).backward()

    def shallow(self, logits):
        return cross_entropy(logits, torch.tensor([0, 1]))

    def deep(self, logits, row):
        return [self.shallow(logits) for _ in range(2)]

class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        return logits.sum()

    @staticmethod
    def backward(ctx, gradient):
        return first(1).sum() * gradient.expand(2, 4)

def first(number): return second(number)
def second(number): return torch.logsumexp(torch.zeros(1, 4), -1)
def after(row): return row
"""


@pytest.fixture(scope="module")
def benchmark() -> Any:
    """The script as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        spec = importlib.util.spec_from_file_location("row_path", SCRIPT)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "row_path", module)
        spec.loader.exec_module(module)
        yield module


def test_the_mark_is_found_in_what_a_function_can_hold(benchmark: Any) -> None:
    import numpy as np
    import pyarrow as pa
    import torch

    @dataclasses.dataclass
    class Row:
        content: object

    class Owner:
        def __init__(self) -> None:
            self.content = mark

    mark, ids = f"a {benchmark.MARK} b", [7, *benchmark.MARK_IDS, 7]
    there = [
        mark,
        mark.encode(),
        {"messages": [{"content": mark}]},
        Row((1, [mark])),
        ids,
        [[1, 2], ids],
        np.array([ids, ids]),
        torch.tensor([ids]),
        pa.table({"ids": [[1], ids]}),
        pa.array([b"x", mark.encode()]),
        {mark: 1},
        collections.deque([ids]),
        collections.UserDict(input_ids=ids),
        {"batch": Row(torch.tensor(ids))},
    ]
    for value in there:
        assert benchmark.holds(value, set()), value
    absent = [
        "a zqxj kvwz b",
        ids[:-2],
        [ids[: len(ids) // 2], ids[len(ids) // 2 :]],
        torch.tensor(ids[::-1]),
        torch.tensor(ids, dtype=torch.float32),
        Owner(),
        Row,
        None,
        {1: 2},
    ]
    for value in absent:
        assert not benchmark.holds(value, set()), value


def test_functions_and_frames_are_counted_exactly(benchmark: Any, tmp_path: Path) -> None:
    package, other = tmp_path / "package", tmp_path / "other.py"
    package.mkdir()
    (package / "flow.py").write_text(FLOW)
    other.write_text(f"def elsewhere(text): return text\nelsewhere({benchmark.MARK!r})\n")
    trace = benchmark.Trace(f"{package}/")
    flow: dict[str, Any] = {"__name__": "flow"}
    trace.node = "check"
    sys.setprofile(trace)
    try:
        exec(compile(FLOW, str(package / "flow.py"), "exec", dont_inherit=True), flow)
        exec(compile(other.read_text(), str(other), "exec"), {})
        flow["read"](f"one {benchmark.MARK}")
        flow["knows_the_number"](3)
        flow["Hidden"](benchmark.MARK).ask()
        trace.node = "train"
        row = flow["encode"](3, benchmark.MARK_IDS)
        flow["Trainer"]().training_step(row)
        flow["after"](row)
    finally:
        benchmark.stop_tracing()
    figures = benchmark.figures_of(trace)
    assert figures["way"] == [
        "flow.py: read",
        "flow.py: Hidden.__init__",
        "flow.py: encode",
        "flow.py: Trainer.training_step",
        "flow.py: Trainer.deep",
    ]
    assert figures["files_that_hold_the_row"] == 1
    assert figures["nodes"]["check"]["functions_that_hold_the_row"] == 2
    assert figures["nodes"]["check"]["functions_run"] == 4
    assert [name for _, _, name in figures["stack"]] == ["Trainer.deep", "Trainer.shallow", "cross_entropy"]
    assert figures["frames_to_loss"] == {"lm_tuning": 2, "torch": 1}
    assert figures["loss"] == "cross_entropy_loss"


@pytest.mark.parametrize("arrives", [True, False])
def test_a_trace_in_which_the_row_does_not_arrive_is_refused(benchmark: Any, arrives: bool) -> None:
    trace = benchmark.Trace("/nowhere/")
    trace.held["train"] = {("a.py", "read"): None} | ({("a.py", "T.training_step"): None} if arrives else {})
    trace.stack = [("lm_tuning", "a.py", "loss")]
    trace.is_over = not arrives
    with pytest.raises(SystemExit, match="No training step" if arrives else "was seen to reach"):
        benchmark.figures_of(trace)


@pytest.mark.slow
def test_a_row_is_followed_through_the_whole_project() -> None:
    command = [sys.executable, str(SCRIPT), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    nodes = [name for name, counts in figures["nodes"].items() if counts["functions_that_hold_the_row"]]
    assert nodes == ["check_examples", "split_examples", "tokenize_examples", "train_model"]
    way = dict.fromkeys(line.partition(": ")[0] for line in figures["way"])
    assert figures["files_that_hold_the_row"] == len(way) <= figures["files_run"]
    assert figures["functions_that_hold_the_row"] == len(figures["way"]) < figures["functions_run"]
    (step,) = [line for line in figures["way"] if line.endswith("training_step")]
    below = [line for line in figures["way"][figures["way"].index(step) :] if line.endswith("forward")]
    assert below or figures["loss"].startswith("cross_entropy")
    assert sum(figures["frames_to_loss"].values()) == len(figures["stack"])
    assert figures["frames_to_loss"]["lm_tuning"] == sum(who == "lm_tuning" for who, _, _ in figures["stack"]) > 0
