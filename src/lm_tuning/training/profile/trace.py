"""Read a trace of the PyTorch profiler: what the device did, for how long, and how long it did nothing."""

from __future__ import annotations

import gzip
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

import orjson

from lm_tuning.runtime.ranges import (
    ATTENTION,
    COMMUNICATION,
    COPIES,
    ELEMENTWISE,
    GROUPS,
    LOSS,
    OPTIMIZER,
    OTHER,
    PRODUCTS,
    QUANTIZED,
    STEP_RANGE,
    WORK_RANGE,
)

_DEVICE_KINDS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_HOST_KINDS = frozenset({"cpu_op", "user_annotation"})
# What an operation inside one of these is for, whatever its own name says. Those of the code itself are no names to
# keep in step with it; the others are PyTorch's, for a model that hands nothing over to the code.
_CONTEXTS = (
    *((group, re.compile(f"^{re.escape(WORK_RANGE + group)}$")) for group in GROUPS),
    (OPTIMIZER, re.compile(r"^optimizer$|^Optimizer\.step#|clip_grad|_foreach_norm")),
    (ATTENTION, re.compile(r"scaled_?dot_?product|flash_?attention|varlen_attn|fmha|sdpa", re.IGNORECASE)),
    (LOSS, re.compile(r"cross_?entropy|nll_?loss", re.IGNORECASE)),
)
# The first that matches a name, in lower case.
_NAMES = tuple(
    (group, re.compile("|".join(patterns)))
    for group, patterns in (
        (
            COPIES,
            (
                r"memcpy|memset|copy_kernel|catarray",
                r"^aten::(copy_|_?to(_copy)?|clone|contiguous|cat|stack|zero_|fill_|empty)$",
            ),
        ),
        (COMMUNICATION, (r"nccl|^c10d::",)),
        (QUANTIZED, (r"quantize|blockwise|igemmlt|gemm_4bit|bitsandbytes",)),
        (ATTENTION, (r"flash|fmha|attention|varlen|sdpa",)),
        (OPTIMIZER, (r"multi_tensor_apply|fused_?adam|adamw?|_foreach_|lpnorm|koptimizer",)),
        (LOSS, (r"cross_?entropy|nll|log_?softmax|_cce|lse|log_?sum_?exp",)),
        (
            PRODUCTS,
            (r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitk|mkldnn|onednn|_mm_", r"^aten::(\w*mm|linear|matmul|mv|dot)$"),
        ),
        (
            ELEMENTWISE,
            (
                r"elementwise|vectorized|reduce|norm|silu|gelu|glu|rope|rotary|softmax|triton_(poi|red|per)",
                r"^aten::(mul|add|sub|div|neg|pow|rsqrt|sqrt|mean|sum|exp|sigmoid|tanh|where|cos|sin|maximum|minimum)_?$",
                r"^aten::(addc\w+|threshold\w*|native_dropout|bernoulli_?|embedding\w*|index\w*|gather|scatter\w*)$",
            ),
        ),
    )
)


# Not a class statement, since the keys have spaces.
EventArguments = TypedDict(
    "EventArguments", {"External id": int, "Sequence number": int, "Fwd thread id": int}, total=False
)
"""What links an event to others: to the operation that queued it, and to the backward pass of it."""


class TraceEvent(TypedDict):
    """An event of a Chrome trace that has a duration; times are in microseconds."""

    name: str
    ts: float
    dur: float
    cat: NotRequired[str]
    tid: NotRequired[int | str]
    args: NotRequired[EventArguments]


@dataclass(frozen=True)
class Operation:
    """One kind of work of the device, over all profiled steps.

    Attributes:
        name: of the kernel on a GPU, of PyTorch's operation on a CPU.
        group: one of :data:`GROUPS`.
        seconds: in all, without what it called.
        count: how often it ran.
    """

    name: str
    group: str
    seconds: float
    count: int


@dataclass(frozen=True)
class TraceTable:
    """What a trace holds, summed up.

    Attributes:
        on_gpu: whether the operations are a GPU's; otherwise the host's own.
        num_steps: profiled steps.
        seconds: from the first step's begin to the last one's end.
        busy_seconds: in which the device did anything, work side by side counted once.
        operations: the longest first.
    """

    on_gpu: bool
    num_steps: int
    seconds: float
    busy_seconds: float
    operations: list[Operation]

    @property
    def idle_fraction(self) -> float:
        """Share of the time in which no kernel ran, or on a CPU no operation of PyTorch."""
        return max(1 - self.busy_seconds / self.seconds, 0.0) if self.seconds else 0.0

    def seconds_by_group(self) -> dict[str, float]:
        """Sum the operations of each group, the longest first; groups without any are left out."""
        total: dict[str, float] = defaultdict(float)
        for operation in self.operations:
            total[operation.group] += operation.seconds
        return dict(sorted(total.items(), key=lambda item: -item[1]))


def read_trace(path: Path) -> TraceTable:
    """Sum a trace up.

    Args:
        path: a Chrome trace as ``torch.profiler`` exports it, gzipped or not, in which each profiled step is a range
            named :data:`STEP_RANGE` with its number.
    """
    content = path.read_bytes()
    events = orjson.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"]
    return sum_up([event for event in events if event.get("ph") == "X" and "dur" in event])


def sum_up(events: list[TraceEvent]) -> TraceTable:
    """Sum complete events of a trace up.

    Args:
        events: each with ``name``, ``cat``, ``ts`` and ``dur`` in microseconds, ``tid`` and ``args``.
    """
    # Annotations of the host alone: the profiler repeats each on the GPU's track, as another category.
    steps = [event for event in events if event.get("cat") == "user_annotation" and _is_step(event["name"])]
    begin = min((event["ts"] for event in steps), default=0.0)
    end = max((event["ts"] + event["dur"] for event in steps), default=0.0)
    # A kernel that the last step queued belongs to it, even where it ends after the host's range.
    device = [event for event in events if event.get("cat") in _DEVICE_KINDS and event["ts"] >= begin]
    host = [event for event in events if event.get("cat") in _HOST_KINDS and begin <= event["ts"] <= end]
    contexts: dict[int, str] = {}
    own = _own_times(host, contexts)
    on_gpu = bool(device)
    if on_gpu:
        end = max(end, *(event["ts"] + event["dur"] for event in device))
        work = [(event["name"], _group_of_kernel(event, contexts), event["dur"]) for event in device]
        # Streams run side by side, so durations add up to more than the time in which the device was busy.
        busy = _union((event["ts"], event["ts"] + event["dur"]) for event in device)
    else:
        work = own
        # Annotations span Python as well, in which no operation runs; they would make the host look busy all along.
        busy = _union((event["ts"], event["ts"] + event["dur"]) for event in host if event["cat"] == "cpu_op")
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for name, group, microseconds in work:
        seconds[name, group] += microseconds / 1e6
        counts[name, group] += 1
    operations = [Operation(name, group, total, counts[name, group]) for (name, group), total in seconds.items()]
    return TraceTable(
        on_gpu=on_gpu,
        num_steps=len(steps),
        seconds=(end - begin) / 1e6,
        busy_seconds=busy / 1e6,
        operations=sorted(operations, key=lambda operation: -operation.seconds),
    )


def group_of(name: str) -> str:
    """Return the group of a kernel or an operation by its name alone."""
    lower = name.lower()
    return next((group for group, pattern in _NAMES if pattern.search(lower)), OTHER)


def _is_step(name: str) -> bool:
    return name.startswith(STEP_RANGE)


def _own_times(host: list[TraceEvent], contexts: dict[int, str]) -> list[tuple[str, str, float]]:
    """Subtract from each operation what it called; note what each one is for under the id that its kernels name.

    Args:
        host: operations and ranges of the host.
        contexts: receives the group by ``External id`` of operations that ran inside attention, loss or optimizer.

    Returns:
        Name, group and microseconds of each operation.
    """
    found = []
    by_thread: dict[int | str | None, list[TraceEvent]] = defaultdict(list)
    for event in host:
        by_thread[event.get("tid")].append(event)
    forward: dict[int, str | None] = {}  # context by the number that an operation shares with its backward pass
    # The thread that makes the steps comes first: the backward pass looks its numbers up, on a GPU from another thread.
    for thread in sorted(by_thread.values(), key=_makes_no_steps):
        makes_steps = not _makes_no_steps(thread)
        # Of two that begin together the longer one is the caller.
        thread.sort(key=lambda event: (event["ts"], -event["dur"]))
        open_events: list[tuple[float, str | None, list[float]]] = []  # end, context, microseconds taken by children
        for event in thread:
            while open_events and open_events[-1][0] <= event["ts"]:
                open_events.pop()
            arguments = event.get("args", {})
            number = arguments.get("Sequence number", -1)
            context = next((group for group, pattern in _CONTEXTS if pattern.search(event["name"])), None)
            if _is_backward(event):
                context = context or forward.get(number)
            if open_events:
                # Only what is called directly: its own children are taken from it in turn.
                open_events[-1][2][0] += event["dur"]
                context = open_events[-1][1] or context
            if number >= 0 and makes_steps and not _is_backward(event):
                # Several share a number; the last one is what the backward pass belongs to.
                forward[number] = context
            taken = [0.0]
            open_events.append((event["ts"] + event["dur"], context, taken))
            identity = arguments.get("External id")
            if context is not None and identity is not None:
                contexts[identity] = context
            if event["cat"] == "cpu_op":
                found.append((event["name"], context or group_of(event["name"]), event["dur"], taken))
    # Times are rounded, so children may add up to a little more than their caller.
    return [(name, group, max(duration - taken[0], 0.0)) for name, group, duration, taken in found]


def _makes_no_steps(events: list[TraceEvent]) -> bool:
    return not any(event["cat"] == "user_annotation" and _is_step(event["name"]) for event in events)


def _is_backward(event: TraceEvent) -> bool:
    """Whether an event is the backward pass of an operation, which then names its thread and shares its number."""
    return bool(event.get("args", {}).get("Fwd thread id"))


def _group_of_kernel(event: TraceEvent, contexts: dict[int, str]) -> str:
    """Tell a kernel's group by the operation that queued it, or else by its name."""
    by_name = group_of(event["name"])
    # A copy between host and device is one, whatever asked for it; a kernel that copies belongs to its operation.
    if by_name == COPIES and event["cat"] != "kernel":
        return by_name
    context = contexts.get(event.get("args", {}).get("External id", -1))
    return context or by_name


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Return how much is covered by any of the spans."""
    covered, reached = 0.0, float("-inf")
    # In order of their begin, each adds what lies beyond the furthest end so far.
    for begin, end in sorted(spans):
        if end > reached:
            covered += end - max(begin, reached)
            reached = end
    return covered
