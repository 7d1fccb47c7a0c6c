"""Explain the end of a training whose loader worker was killed, which PyTorch reports from wherever the run then is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lm_tuning.errors import MachineFault

_SAID_BY_PYTORCH = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\) "
    r"(?:is killed by signal: (?P<signal>[^.]+)|exited unexpectedly(?: with exit code (?P<code>\d+))?)"
)


@dataclass(frozen=True)
class LostWorker:
    """What PyTorch knows of worker processes that are gone.

    Attributes:
        pids: as text, separated by commas.
        signal: the system's words for the signal that killed them, such as ``Killed``; ``None`` when not known.
        exit_code: with which they ended by themselves; ``None`` when not known.
    """

    pids: str
    signal: str | None
    exit_code: int | None


@contextmanager
def explain_lost_worker(describe_state: Callable[[], str], *, num_workers: int) -> Iterator[None]:
    """Turn PyTorch's report of a lost worker into a message that names the likely cause and the way on.

    Args:
        describe_state: returns how far the training is and how to go on, in whole sentences; asked for after a failure.
        num_workers: worker processes of the training.

    Raises:
        MachineFault: a worker was killed, or ended by itself.
    """
    try:
        yield
    except Exception as error:
        lost = find_lost_worker(error)
        if lost is None:
            raise
        raise MachineFault(f"{describe_lost_worker(lost, num_workers=num_workers)} {describe_state()}") from error


def find_lost_worker(error: BaseException | None) -> LostWorker | None:
    """Return which worker an error is about, or ``None`` when it has another cause.

    The report comes from a signal handler, so whatever ran at that moment may have wrapped it.

    Args:
        error: what ended a training.
    """
    while error is not None:
        said = _SAID_BY_PYTORCH.search(str(error)) if isinstance(error, RuntimeError) else None
        if said is not None:
            code = said["code"]
            name = said["signal"].strip() if said["signal"] else None
            return LostWorker(said["pids"], name, None if code is None else int(code))
        error = error.__cause__ or error.__context__
    return None


def describe_lost_worker(lost: LostWorker, *, num_workers: int, root: Path = Path("/")) -> str:
    """Say which worker is gone, the likely cause and what to change.

    Args:
        lost: what is known.
        num_workers: worker processes of the training.
        root: folder that holds ``proc``.
    """
    several = "," in lost.pids
    subject = f"The loader workers {lost.pids} were" if several else f"The loader worker {lost.pids} was"
    setting = (
        f"train.num_loader_workers is {num_workers}; "
        f"{'fewer take less memory, and 0' if num_workers > 1 else '0'} prepares batches in the training process"
    )
    if lost.exit_code is not None:
        ended = subject.removesuffix(" was").removesuffix(" were")
        return f"{ended} ended with exit code {lost.exit_code}, by what it printed above or by foreign code. {setting}."
    if lost.signal == "Bus error":
        return (
            f"{subject} killed by the signal 'Bus error': the shared memory in /dev/shm is full. Enlarge it "
            f"(docker run --shm-size=8g). {setting}."
        )
    if lost.signal not in {None, "Killed"}:
        return f"{subject} killed by the signal '{lost.signal}'. {setting}."
    return (
        f"{subject} killed from outside. The likely cause is that the machine, or the container's limit, ran out of "
        f"memory{_describe_memory(root)}: the system then kills a process (see dmesg). {setting}."
    )


def _describe_memory(root: Path) -> str:
    """Say how much memory the machine has available now; nothing where it does not tell."""
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return ""
    sizes = {name: int(size.split()[0]) / 2**20 for name, _, size in (line.partition(":") for line in lines) if size}
    if not {"MemAvailable", "MemTotal"} <= sizes.keys():
        return ""
    return f" (now {sizes['MemAvailable']:.1f} of the machine's {sizes['MemTotal']:.1f} GiB are available)"
