"""Choose the environment variables that decide speed, and set those that the user has not set.

They must be set before torch is imported: OpenMP and MKL read theirs when they are loaded, CUDA when it starts. Worker
processes and ranks inherit them. Also here: how often Python looks for reference cycles.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import io
import json
import logging
import os
import platform
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from lm_tuning.secrets import mask_variable

logger = logging.getLogger(__name__)

# Names and values that this project has set, so that they are not mistaken for the user's: by a later session in this
# process, or by a process that inherits them.
MARKER = "LM_TUNING_SET_VARIABLES"
_CUBLAS_DETERMINISTIC = (":4096:8", ":16:8")
_X86 = ("x86_64", "amd64")
# Read at every call rather than once, so never too late.
_READ_AT_EACH_CALL = ("TOKENIZERS_PARALLELISM", "FLASH_ATTENTION_DETERMINISTIC")


@dataclass(frozen=True)
class Decision:
    """One environment variable and why it has its value.

    Attributes:
        name: of the variable.
        value: what it is, or will be set to.
        reason: why, in a few words.
        source: ``user`` if it stood in the environment already, which always wins; else ``lm_tuning``.
    """

    name: str
    value: str
    reason: str
    source: Literal["user", "lm_tuning"]


def plan_variables(
    *,
    device_kind: str,
    cores: int,
    num_threads: int | Literal["auto"] = "auto",
    reproducibility: str = "fast",
    openmp: str | None = None,
    vendor: str = "unknown",
    machine: str = "x86_64",
    extra: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[Decision]:
    """Decide on every variable, without setting any.

    Args:
        device_kind: ``cuda``, ``mps`` or ``cpu``. Beside an accelerator one thread is right, since loader workers share
            the cores; training on a CPU needs them all.
        cores: physical cores that this process may use.
        num_threads: threads of one CPU operation; ``auto`` decides by device.
        reproducibility: ``fast`` or ``deterministic``.
        openmp: OpenMP library of the installed torch, from `find_openmp`.
        vendor: of the processor.
        machine: instruction set of the processor.
        extra: further variables that the user asks for in the parameters.
        environ: variables that are set already; the process's own by default.
    """
    environ = os.environ if environ is None else environ
    users = {name: value for name, value in environ.items() if not _is_ours(environ, name)}
    wanted = dict(extra or {})
    reasons = dict.fromkeys(wanted, "environment.variables asks for it")

    def want(name: str, value: str, reason: str) -> None:
        if name not in wanted:
            wanted[name], reasons[name] = value, reason

    # OpenMP and MKL always get the same count, see _plan_num_threads().
    count, reason = _plan_num_threads(device_kind, cores, num_threads, {**wanted, **users})
    want("OMP_NUM_THREADS", count, reason)
    want("MKL_NUM_THREADS", count, reason)
    # MKL exists for x86 alone. It loads an OpenMP of its own choice unless told, and two in one process share no pool.
    if machine.lower() in _X86 and openmp in ("gnu", "intel"):
        layer = openmp.upper()
        library = "GNU OpenMP (libgomp)" if openmp == "gnu" else "Intel OpenMP (libiomp5)"
        want("MKL_THREADING_LAYER", layer, f"torch brings {library}; MKL must not load a second one")
        # mkl-service ends a process that asks for the layer INTEL after another OpenMP is loaded, unless this is set.
        # The name misleads: it forces no layer, and MKL picks its kernels by processor as before.
        meeting = "mkl-service warns rather than exits where two OpenMP libraries meet"
        want("MKL_SERVICE_FORCE_INTEL", "1", f"{meeting}; kernels stay those for {vendor} processors")
    want("TOKENIZERS_PARALLELISM", "false", "worker processes are forked; switched on while tokenizing")
    if device_kind == "cuda":
        # torch's old name for PYTORCH_ALLOC_CONF. A user who sets it has decided; setting the new one beside it would
        # take that decision away.
        old_name = "PYTORCH_CUDA_ALLOC_CONF"
        if old_name in users or old_name in wanted:
            want(old_name, "", "")
        # Growing segments need the driver's virtual memory calls, which Windows and its Linux subsystem lack.
        elif platform.system() == "Linux" and "microsoft" not in platform.release().lower():
            growing = "segments that grow: batches of changing length do not fragment the card's memory"
            want("PYTORCH_ALLOC_CONF", "expandable_segments:True", growing)
    if reproducibility == "deterministic":
        want("CUBLAS_WORKSPACE_CONFIG", _CUBLAS_DETERMINISTIC[0], "cuBLAS repeats its sums only with a fixed workspace")
        want("FLASH_ATTENTION_DETERMINISTIC", "1", "the flash-attn package then repeats its backward sums")
    decisions = [_settle(name, value, reasons[name], users) for name, value in wanted.items()]
    return [_mention_conflict(decision, num_threads) for decision in decisions]


def apply_variables(decisions: list[Decision], environ: MutableMapping[str, str] | None = None) -> list[str]:
    """Set the variables that are ours to set, and take back those of an earlier plan that this one lacks.

    Logs a warning if torch is loaded already, since most variables are read when it is.

    Args:
        decisions: from `plan_variables`.
        environ: where to set them; the process's own variables by default.

    Returns:
        Names of the variables that changed.
    """
    environ = os.environ if environ is None else environ
    ours = {decision.name: decision.value for decision in decisions if decision.source == "lm_tuning"}
    changed = [name for name, value in ours.items() if environ.get(name) != value]
    for name in _marked(environ):
        if name not in ours and _is_ours(environ, name):
            changed.append(name)
            del environ[name]
    environ.update(ours)
    environ[MARKER] = json.dumps(ours)
    # A variable that is read at every call is never too late, so it is no reason to warn.
    late = [name for name in changed if name not in _READ_AT_EACH_CALL]
    if late and environ is os.environ and "torch" in sys.modules:
        logger.warning(
            "torch was imported before the environment was set, so these variables may come too late for this process: "
            "%s. Thread counts are still set through torch. Set the variables in the shell, or import torch later.",
            ", ".join(late),
        )
    return changed


@contextmanager
def tokenizer_parallelism(enabled: bool, environ: MutableMapping[str, str] | None = None) -> Iterator[None]:
    """Let the tokenizers library use all cores inside the block, or keep it to one; the user's own setting wins.

    The library reads the variable at every call. Keep it off where processes are forked: a fork in the middle of its
    thread pool hangs the child.

    Args:
        enabled: whether to tokenize in parallel.
        environ: variables to change; the process's own by default.
    """
    environ = os.environ if environ is None else environ
    name = "TOKENIZERS_PARALLELISM"
    before = environ.get(name)
    if before is not None and not _is_ours(environ, name):
        yield
        return
    _set(environ, name, "true" if enabled else "false")
    try:
        yield
    finally:
        _set(environ, name, before)


def find_openmp() -> str | None:
    """Return which OpenMP library the installed torch brings, without importing it.

    Returns:
        ``gnu``, ``intel``, ``llvm``, or None when there is none to be seen.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    # Wheels from PyPI keep such libraries in torch/lib or, where they were bundled afterwards, in torch.libs beside it.
    package = Path(spec.origin).parent
    names = [path.name for folder in (package / "lib", package.with_name("torch.libs")) for path in folder.glob("*")]
    for prefix, kind in (("libgomp", "gnu"), ("libiomp5", "intel"), ("libomp", "llvm")):
        if any(name.startswith(prefix) for name in names):
            return kind
    return None


def summarize_decisions(decisions: list[Decision]) -> list[str]:
    """Write decisions of the same reason on one line each."""
    return group_by_reason((each.reason, f"{each.name}={mask_variable(each.name, each.value)}") for each in decisions)


def group_by_reason(settings: Iterable[tuple[str, str]]) -> list[str]:
    """Write settings of the same reason on one line each, in the order in which the reasons come up.

    Args:
        settings: reason and setting.
    """
    groups: dict[str, list[str]] = {}
    for reason, setting in settings:
        groups.setdefault(reason, []).append(setting)
    return [f"{' '.join(grouped)}: {reason}" for reason, grouped in groups.items()]


def read_num_threads(environ: Mapping[str, str], name: str = "OMP_NUM_THREADS") -> int | None:
    """Return the threads that a variable asks for; None where it names no positive number.

    Args:
        environ: variables.
        name: of the variable.
    """
    # OpenMP takes a list, one count for each level of nesting; we have the first level only.
    first = environ.get(name, "").split(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else None


def _plan_num_threads(
    device_kind: str, cores: int, num_threads: int | Literal["auto"], given: Mapping[str, str]
) -> tuple[str, str]:
    """Return one count for OpenMP and MKL: two counts that differ make one library wait for the other."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        count = read_num_threads(given, name)
        if count is not None:
            return str(count), f"same as {name}"
    if num_threads != "auto":
        return str(num_threads), "environment.num_threads asks for it"
    if device_kind == "cpu":
        return str(cores), "training on the CPU: every physical core that this process may use"
    return "1", f"the {device_kind.upper()} device computes, and loader workers share the cores"


def _settle(name: str, value: str, reason: str, users: Mapping[str, str]) -> Decision:
    if name in users:
        return Decision(name, users[name], "set by you", "user")
    return Decision(name, value, reason, "lm_tuning")


def _mention_conflict(decision: Decision, num_threads: int | Literal["auto"]) -> Decision:
    """Describe where a variable of the user stands against a parameter."""
    name, value, note = decision.name, decision.value, ""
    if decision.source == "lm_tuning":
        return decision
    if name == "OMP_NUM_THREADS" and num_threads != "auto" and value != str(num_threads):
        note = f", which wins over environment.num_threads={num_threads}"
    if name == "CUBLAS_WORKSPACE_CONFIG" and value not in _CUBLAS_DETERMINISTIC:
        note = f"; in deterministic mode torch accepts only {' or '.join(_CUBLAS_DETERMINISTIC)}"
    return replace(decision, reason=decision.reason + note)


def _marked(environ: Mapping[str, str]) -> dict[str, str]:
    try:
        marked = json.loads(environ.get(MARKER, "{}"))
    except json.JSONDecodeError:
        return {}
    return marked if isinstance(marked, dict) else {}


def _is_ours(environ: Mapping[str, str], name: str) -> bool:
    """Return whether the variable still has the value that we gave it."""
    return name in environ and _marked(environ).get(name) == environ[name]


def _set(environ: MutableMapping[str, str], name: str, value: str | None) -> None:
    marked = _marked(environ)
    if value is None:
        environ.pop(name, None)
        marked.pop(name, None)
    else:
        environ[name] = marked[name] = value
    environ[MARKER] = json.dumps(marked)


# Loading torch, transformers, peft and MLflow makes a million objects, none of them garbage, and Python would look
# through all of them again and again; what that took of a start stands in docs/lab-log.md. After 100,000 new objects,
# not 700 or 2,000, cycles still stay bounded, unlike with the search switched off.
_AS_STARTED = gc.get_threshold()
_RARELY = (100_000, 50, 1000)


def collect_rarely() -> None:
    """Rarely look for reference cycles: while packages load, and never when the interpreter ends.

    At its end Python looks for cycles in the million objects several times, two seconds long, only to hand back memory
    that the process loses anyway.
    """
    gc.set_threshold(*_RARELY)
    atexit.unregister(_end_quickly)
    atexit.register(_end_quickly)


def _end_quickly() -> None:
    """Leave nothing to search at the interpreter's end, but write what open files hold."""
    everything = gc.get_objects()
    # By the class, since a proxy may import what it stands for when it is asked for its class; and each class once.
    kinds = (io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper)
    files = {kind for kind in {type(each) for each in everything} if issubclass(kind, kinds)}
    for file in [each for each in everything if type(each) in files and not each.closed]:
        try:
            # A pipe whose reader has stopped would be waited for; Python itself sees to standard output.
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                file.flush()
        except io.UnsupportedOperation:
            continue  # in memory alone
        except OSError as error:
            # As Python says it of a file that it closes at its end, and cannot say once the search is left out.
            sys.stderr.write(f"{getattr(file, 'name', file)!s} could not be written to its end: {error}\n")
    gc.freeze()


@contextmanager
def heap_set_aside() -> Iterator[None]:
    """Let the garbage collector look at objects that are made inside alone.

    Looking through all that packages have made takes 0.4 s each time, be it asked for or not. What is garbage already
    when this begins stays until it ends.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def restore_collection() -> None:
    """Go back to Python's own pace, so that a cycle that holds tensors is freed soon."""
    gc.set_threshold(*_AS_STARTED)
