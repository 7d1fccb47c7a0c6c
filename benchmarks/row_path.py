"""Trace the way of one chat row from its file to the loss: the files, functions and frames that it passes.

    python benchmarks/row_path.py [--src PATH | --revision REV] [--checks] [--json]

In a temporary copy of the project, ``kedro run --pipelines=split,train`` reads a few chat rows with a mark in each,
and trains a tiny random Llama on all of them in one step on the CPU. Traced are the functions of the package
while a node runs, up to the end of the first ``training_step``. Nothing inside the package is named here, so that the
figures of two layouts can be compared: ``--src`` traces another checkout (its folder ``src``), ``--revision`` a git
revision.

- *run*: functions of the package that ran inside a node, for whatever purpose.
- *hold the row*: those that held the mark when they were called or when they returned: in an argument, a local variable
  or the returned value, as text, as bytes or as the mark's token ids, also inside containers, dataclasses, arrays,
  tensors and Arrow tables, but not behind the attributes of other objects. A function that knows the row only by its
  number or its hash does not hold it.
- *frames*: the deepest stack between ``training_step`` and PyTorch's cross-entropy, or the log-sum-exp or log-softmax
  that stands for it, in the forward pass; both ends are left out.

Comprehensions are no functions and no frames of their own. What reads and writes data sets between nodes, hooks and
imports are not traced. Checks that look at rows before training are switched off (``train.health.probe=false`` and a
fixed size of micro-batches) unless ``--checks`` is given.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from python_source import run_git
from tiny_job import MARK, MARK_IDS, NUM_ROWS, save_tiny_model, write_rows

PROJECT = Path(__file__).resolve().parents[1]
PACKAGE = "lm_tuning"
PARTS = ("src", "conf", "pyproject.toml")

MAX_DEPTH = 6
MAX_ITEMS = 64
"""Members of a container that are searched; there are few rows."""

LOSSES = {"cross_entropy", "cross_entropy_loss", "nll_loss", "nll_loss_nd", "logsumexp", "log_softmax"}
FUNCTION_FLAGS = 0x1 | 0x2  # CO_OPTIMIZED and CO_NEWLOCALS: the bodies of modules and classes lack one of them
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


def holds(value: Any, types: set[str], depth: int = MAX_DEPTH) -> bool:
    """Return whether a value holds the mark, and note the package's own types around it.

    Args:
        value: anything.
        types: receives names of the package's classes whose instances hold it.
        depth: containers that may still be opened.
    """
    if isinstance(value, str):
        return MARK in value
    if isinstance(value, bytes | bytearray | memoryview):
        return MARK.encode() in bytes(value)
    if depth == 0 or value is None or isinstance(value, int | float | type):
        return False
    module = type(value).__module__.partition(".")[0]
    if module in ("numpy", "torch", "pyarrow"):
        return holds_ids(as_list(value), types, depth)
    held = any([holds(inner, types, depth - 1) for inner in members(value)]) or holds_ids(value, types, 0)
    if held and module == PACKAGE:
        types.add(type(value).__qualname__)
    return held


def as_list(value: Any) -> Any:
    """Return the content of an array, a tensor or an Arrow table as lists; nothing where that is not possible."""
    try:
        if hasattr(value, "detach"):
            return None if value.is_floating_point() or value.is_complex() else value.detach().cpu().tolist()
        if getattr(getattr(value, "dtype", None), "kind", "i") in "fc":
            return None
        return value.to_pylist() if hasattr(value, "to_pylist") else value.tolist()
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None


def members(value: Any) -> Iterator[Any]:
    """Yield what lies in a container or a data class."""
    if isinstance(value, Mapping):
        yield from [*list(value.keys())[:MAX_ITEMS], *list(value.values())[:MAX_ITEMS]]
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from list(value)[:MAX_ITEMS]
    elif dataclasses.is_dataclass(value):
        yield from (getattr(value, item.name, None) for item in dataclasses.fields(value))
    elif type(value).__name__ == "Encoding":  # of the tokenizers package
        yield value.ids


def holds_ids(value: Any, types: set[str], depth: int) -> bool:
    """Return whether a list holds the mark's ids one after another, or a list in it does."""
    if not isinstance(value, list | tuple) or not value:
        return depth > 0 and not isinstance(value, list | tuple) and holds(value, types, depth - 1)
    if all(isinstance(item, int) for item in value[: len(MARK_IDS)]):
        first = MARK_IDS[0]
        end = len(value) - len(MARK_IDS) + 1
        return any(value[at] == first and list(value[at : at + len(MARK_IDS)]) == MARK_IDS for at in range(end))
    return depth > 0 and any([holds(inner, types, depth - 1) for inner in value[:MAX_ITEMS]])


@dataclasses.dataclass
class Trace:
    """What was seen.

    Attributes:
        source: the package's folder.
        run: functions that ran, ``(file, name)``, by node.
        held: functions that held the row, by node, in the order in which they first did.
        types: the package's classes whose instances held it.
        stack: the deepest stack between ``training_step`` and the loss, outermost first: whose code, file and function.
        is_over: the first step's loss is there.
    """

    source: str
    run: dict[str, dict[tuple[str, str], None]] = dataclasses.field(default_factory=lambda: defaultdict(dict))
    held: dict[str, dict[tuple[str, str], None]] = dataclasses.field(default_factory=lambda: defaultdict(dict))
    types: set[str] = dataclasses.field(default_factory=set)
    stack: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    loss: str = ""
    is_over: bool = False
    node: str = ""
    step: FrameType | None = None
    codes: dict[CodeType, tuple[str, str] | None] = dataclasses.field(default_factory=dict)

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        """Receive an event of ``sys.setprofile``."""
        code = frame.f_code
        if event == "c_call":
            if self.step is not None and getattr(value, "__name__", "") in LOSSES:
                self.note_stack(frame, value.__name__)
            return
        if event not in ("call", "return"):
            return
        if code.co_name == "cross_entropy" and event == "call" and self.step is not None:
            self.note_stack(frame.f_back, code.co_name)
        if code not in self.codes:
            self.codes[code] = self.identify(code)
        function = self.codes[code]
        if function is None:
            return
        if code.co_name == "training_step":
            self.follow_step(frame, event)
        self.run[self.node].setdefault(function)
        if function not in self.held[self.node] and (
            (event == "return" and holds(value, self.types)) or holds(list(frame.f_locals.values()), self.types)
        ):
            self.held[self.node].setdefault(function)

    def identify(self, code: CodeType) -> tuple[str, str] | None:
        """Return the file and the name of a function of the package; None for other code."""
        if not code.co_filename.startswith(self.source) or code.co_flags & FUNCTION_FLAGS != FUNCTION_FLAGS:
            return None
        name = code.co_qualname
        while name.rpartition(".")[2] in COMPREHENSIONS:
            name = name.rpartition(".")[0].removesuffix(".<locals>")
        return (os.path.relpath(code.co_filename, self.source), name) if name != "<module>" else None

    def follow_step(self, frame: FrameType, event: str) -> None:
        """Note where the first training step begins, and that all is seen when it ends."""
        if event == "call" and self.step is None:
            self.step = frame
        elif event == "return" and frame is self.step:
            self.is_over = True
            self.step = None
            stop_tracing()

    def note_stack(self, frame: FrameType | None, loss: str) -> None:
        """Keep the stack from the training step to the loss if it is deeper in the package than those before."""
        stack = []
        while frame is not None and frame is not self.step:
            if frame.f_code.co_name not in COMPREHENSIONS:
                stack.append(self.describe(frame.f_code))
            frame = frame.f_back
        is_backward = any(file.startswith("torch/autograd/") and name.endswith("backward") for _, file, name in stack)
        depth = [(sum(who == PACKAGE for who, _, _ in each), len(each)) for each in (stack, self.stack)]
        if frame is not None and not is_backward and depth[0] > depth[1]:
            self.stack, self.loss = stack[::-1], loss

    def describe(self, code: CodeType) -> tuple[str, str, str]:
        """Return whose code it is, the file and the function."""
        file = code.co_filename
        if file.startswith(self.source):
            return PACKAGE, os.path.relpath(file, self.source), code.co_qualname
        file = file.partition("site-packages/")[2] or file
        return file.partition("/")[0] or "other", file, code.co_qualname


def stop_tracing() -> None:
    """Trace nothing from now on."""
    sys.setprofile(None)
    threading.setprofile(None)


def trace_run(arguments: list[str], source: Path, result: Path) -> None:
    """Run ``kedro`` in this process with its nodes traced, and write what was seen."""
    import peft  # noqa: F401 - their imports are not on the way, and slow under a trace
    import transformers  # noqa: F401
    from kedro.framework.cli.cli import main as run
    from kedro.pipeline.node import Node

    trace = Trace(f"{source / PACKAGE}{os.sep}")
    run_node = Node.run

    def run_traced(self: Any, *inputs: Any, **keywords: Any) -> Any:
        if trace.is_over:
            return run_node(self, *inputs, **keywords)
        trace.node = getattr(self.func, "__name__", self.name)
        threading.setprofile(trace)
        sys.setprofile(trace)
        try:
            return run_node(self, *inputs, **keywords)
        finally:
            stop_tracing()

    Node.run = run_traced  # type: ignore[method-assign]
    sys.argv = ["kedro", *arguments]
    try:
        run()
    except SystemExit as end:
        if end.code:
            raise
    loaded = Path(sys.modules[PACKAGE].__file__ or "").resolve().parents[1]
    if loaded != source:
        raise SystemExit(f"Traced was to be {source}, and {loaded} was loaded.")
    result.write_text(json.dumps(figures_of(trace)))


def figures_of(trace: Trace) -> dict[str, Any]:
    """Turn what was seen into figures; refuse a trace in which the row did not arrive."""
    held = dict.fromkeys(function for functions in trace.held.values() for function in functions)
    run = dict.fromkeys(function for functions in trace.run.values() for function in functions)
    if not trace.is_over or not trace.stack:
        raise SystemExit("No training step of the package's own was traced up to a loss.")
    if not any(name.endswith("training_step") for _, name in held):
        raise SystemExit("No marked row was seen to reach the first training step.")
    whose = [who for who, _, _ in trace.stack]
    return {
        "files_that_hold_the_row": len({file for file, _ in held}),
        "functions_that_hold_the_row": len(held),
        "types_that_hold_the_row": sorted(trace.types),
        "files_run": len({file for file, _ in run}),
        "functions_run": len(run),
        "frames_to_loss": {who: whose.count(who) for who in dict.fromkeys(whose)},
        "loss": trace.loss,
        "stack": trace.stack,
        "nodes": {
            node: {
                "files_that_hold_the_row": len({file for file, _ in functions}),
                "functions_that_hold_the_row": len(functions),
                "files_run": len({file for file, _ in trace.run[node]}),
                "functions_run": len(trace.run[node]),
            }
            for node, functions in trace.held.items()
        },
        "way": [f"{file}: {name}" for file, name in held],
    }


def kedro_arguments(*, checks: bool) -> list[str]:
    """Return what follows ``kedro``: all rows in one step, and nothing else to do."""
    parameters = {
        "model.name_or_path": "models/tiny",
        "data.path": "rows.jsonl",
        "split.validation": 0,
        "split.test": 0,
        "train.effective_batch_rows": NUM_ROWS,
        "train.effective_batch_tokens": "null",
        "train.max_steps": 1,
        "train.eval_every_steps": "null",
        "train.save_every_steps": "null",
        "train.num_loader_workers": 0,
        "train.precision": "float32",
    }
    if not checks:
        parameters |= {"train.health.probe": "false", "train.micro_batch_tokens": 512}
    return [
        "run",
        "--pipelines=split,train",
        "--params",
        ",".join(f"{key}={value}" for key, value in parameters.items()),
    ]


def trace_project(checkout: Path, *, checks: bool) -> dict[str, Any]:
    """Trace a row through a copy of a checkout, in a process of its own.

    Args:
        checkout: a folder with ``src``, ``conf`` and ``pyproject.toml``.
        checks: leave the checks before training on.
    """
    with tempfile.TemporaryDirectory() as scratch:
        project, result = Path(scratch).resolve() / "project", Path(scratch) / "trace.json"
        project.mkdir()
        *folders, file = PARTS
        shutil.copy(checkout / file, project)
        for name in folders:
            left_out = shutil.ignore_patterns("__pycache__", "*.egg-info", "local")
            shutil.copytree(checkout / name, project / name, ignore=left_out)
        (project / "conf/local").mkdir()
        write_rows(project / "rows.jsonl")
        save_tiny_model(project / "models/tiny")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW_", "KEDRO_"))}
        path = os.pathsep.join(filter(None, [str(project / "src"), kept.get("PYTHONPATH")]))
        command = [sys.executable, __file__, "--trace", str(result), *(["--checks"] if checks else [])]
        environment = kept | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "DO_NOT_TRACK": "true"}
        done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(
                f"The traced run ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
            )
        figures: dict[str, Any] = json.loads(result.read_text())
        return figures


def write_report(figures: dict[str, Any]) -> str:
    """Write the table, the stack and the functions by file."""
    lines = [f"{'':24}{'hold the row':>26}{'run':>26}"]
    for node, counts in {**figures["nodes"], "all": figures}.items():
        held, run = (
            f"{counts[f'files_{kind}']} files, {counts[f'functions_{kind}']} functions"
            for kind in ("that_hold_the_row", "run")
        )
        lines.append(f"{node:24}{held:>26}{run:>26}")
    types = figures["types_that_hold_the_row"]
    lines.append(f"\nclasses of the package that hold it: {len(types)} ({', '.join(types)})")
    frames = ", ".join(f"{who} {count}" for who, count in figures["frames_to_loss"].items())
    lines.append(f"\nframes between training_step and {figures['loss']}: {frames}")
    lines += [f"  {file}: {name}" for _, file, name in figures["stack"]]
    lines.append("\nfunctions that hold the row, as they first do")
    lines += [f"  {function}" for function in figures["way"]]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Trace the row and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--src", type=Path, default=PROJECT / "src", help="folder src of the checkout to trace")
    which.add_argument("--revision", help="git revision to trace")
    which.add_argument("--trace", type=Path, help="trace in this process and write the figures to this file")
    parser.add_argument("--checks", action="store_true", help="leave the checks before training on")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.trace:
        trace_run(kedro_arguments(checks=options.checks), Path.cwd() / "src", options.trace)
        return
    with tempfile.TemporaryDirectory() as scratch:
        checkout = options.src.resolve().parent
        if options.revision:
            checkout = Path(scratch)
            content = run_git(PROJECT, "archive", "--format=tar", options.revision, "--", *PARTS)
            with tarfile.open(fileobj=io.BytesIO(content)) as archive:
                archive.extractall(checkout, filter="data")
        figures = trace_project(checkout, checks=options.checks)
    sys.stdout.write(json.dumps(figures, indent=2) + "\n" if options.json else write_report(figures))


if __name__ == "__main__":
    main()
