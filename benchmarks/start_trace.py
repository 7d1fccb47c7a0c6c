"""Show where the time of a whole ``kedro run`` goes, above all in its first half minute.

    python benchmarks/start_trace.py                                 # nothing kept, the model kept, all kept
    python benchmarks/start_trace.py --runs first again --least 1    # leave the conversion out, parts over a second
    python benchmarks/start_trace.py --runs again --imports          # and what imports cost, by package
    python benchmarks/start_trace.py --processor                     # where other programs run: no waits, no contention
    python benchmarks/start_trace.py --params train.max_steps=4      # any parameters of kedro run

Each run has a scratch project of its own data. *convert* keeps nothing, *first* the converted model alone, *again* all
that the run before has left. A thread of the traced process looks at the main thread's stack every few milliseconds and
counts the time since its last look for the stack that it finds, so a long call that holds the interpreter counts in
full. What the sampling costs is seen by the wall time of the same run without it (``--plain``).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import runpy
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

PROJECT = Path(__file__).resolve().parents[1]
MODEL = Path("data/06_models/base")
#: What a run leaves, by name, in the scratch project.
LEFT = ("data", "mlflow.db", "mlruns", "mlartifacts", "logs")
SAMPLE_SECONDS = 0.004
IN_PROCESSOR_TIME = "START_TRACE_IN_PROCESSOR_TIME"
SILENT = ("importlib", "runpy", "pluggy", "contextlib", "functools", "threading")

say = sys.stdout.write


class Sampler(threading.Thread):
    """Add up the time that the main thread spends in each stack."""

    def __init__(self, file: Path) -> None:
        """Begin with nothing seen; ``file`` receives stacks and seconds as JSON."""
        super().__init__(daemon=True)
        self._file = file
        self._main = threading.main_thread().ident or 0
        self._now: Callable[[], float]
        if IN_PROCESSOR_TIME in os.environ:
            clock = time.pthread_getcpuclockid(self._main)
            self._now = partial(time.clock_gettime, clock)
        else:
            self._now = time.perf_counter
        self._stacks: Counter[tuple[str, ...]] = Counter()
        self._is_over = threading.Event()

    def run(self) -> None:
        """Look until the end."""
        last = self._now()
        while not self._is_over.wait(SAMPLE_SECONDS):
            frame = sys._current_frames().get(self._main)
            now = self._now()
            self._stacks[tuple(_names(frame))] += int((now - last) * 1e6)
            last = now

    def write(self) -> None:
        """Stop, and write what was seen."""
        self._is_over.set()
        self.join()
        rows = [{"stack": stack, "seconds": micros / 1e6} for stack, micros in self._stacks.items()]
        self._file.write_text(json.dumps(rows))


def _names(frame: FrameType | None) -> list[str]:
    """Return module and function of each frame, outermost first."""
    names = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "?")
        if not module.startswith(SILENT):
            names.append(f"{module}:{frame.f_code.co_name}")
        frame = frame.f_back
    return names[::-1]


def trace(file: Path, arguments: list[str]) -> None:
    """Run Kedro's command line in this process, sampled."""
    sampler = Sampler(file)
    sampler.start()
    sys.argv = ["kedro", *arguments]
    try:
        runpy.run_module("kedro", run_name="__main__", alter_sys=True)
    finally:
        sampler.write()


class Part:
    """A function within its callers, with the seconds that were spent below it."""

    def __init__(self) -> None:
        """Begin with no time."""
        self.seconds = 0.0
        self.parts: defaultdict[str, Part] = defaultdict(Part)

    def add(self, stack: list[str], seconds: float) -> None:
        """Count seconds for a stack, outermost first."""
        self.seconds += seconds
        if stack:
            self.parts[stack[0]].add(stack[1:], seconds)

    def show(self, least: float, depth: int = 0) -> None:
        """Print the parts of at least so many seconds; a caller that only passes time on is left out."""
        for name, part in sorted(self.parts.items(), key=lambda item: -item[1].seconds):
            if part.seconds < least:
                break
            large = [inner for inner in part.parts.values() if inner.seconds >= least]
            passes_on = len(large) == 1 and part.seconds - large[0].seconds < least / 2
            ours = name.startswith("lm_tuning") and not name.endswith("<module>")
            if not passes_on or (ours and depth < 40):
                say(f"{part.seconds:8.2f}  {'. ' * depth}{name}\n")
                part.show(least, depth + 1)
            else:
                part.show(least, depth)


class Scratch:
    """A project with this one's sources and configuration and its own data."""

    def __init__(self, folder: Path, params: str | None) -> None:
        """Make the project in ``folder``."""
        self.folder = folder
        self.arguments = ["run", *(["--params", params] if params else [])]
        for name in ("src", "conf"):
            shutil.copytree(PROJECT / name, folder / name)
        shutil.copy2(PROJECT / "pyproject.toml", folder)
        (folder / "conf" / "local").mkdir(exist_ok=True)

    def forget(self, *, with_model: bool) -> None:
        """Remove what runs have left; without ``with_model`` the converted model and its digests stay."""
        kept = self.folder / "kept"
        if not with_model and (self.folder / MODEL).is_dir():
            (self.folder / MODEL).rename(kept)
        for name in LEFT:
            path = self.folder / name
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True) if path.is_file() else None
        if kept.is_dir():
            (self.folder / MODEL).parent.mkdir(parents=True)
            kept.rename(self.folder / MODEL)

    def run(self, command: list[str], *, told: bool) -> tuple[float, float, str]:
        """Run a command to its end.

        Args:
            command: what comes before Kedro's own arguments.
            told: print each line with the seconds since the start.

        Returns:
            The wall seconds, the processor seconds, and what was printed.
        """
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.perf_counter()
        lines = []
        with subprocess.Popen(
            [*command, *self.arguments],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "160", "DO_NOT_TRACK": "1"},
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if told:
                    say(f"{time.perf_counter() - began:8.2f}  {line.rstrip()[:140]}\n")
        taken = time.perf_counter() - began
        if process.returncode:
            raise RuntimeError(f"kedro {' '.join(self.arguments)} gave {process.returncode}:\n{''.join(lines[-40:])}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
        return taken, processor, "".join(lines)


def show_imports(text: str, least: float) -> None:
    """Print the own import time of each top-level package from what ``-X importtime`` has said."""
    seconds: Counter[str] = Counter()
    for own, module in re.findall(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)", text):
        seconds[module.split(".")[0]] += int(own)
    say(f"imports: {sum(seconds.values()) / 1e6:.2f} s by themselves\n")
    for package, micros in seconds.most_common():
        if micros / 1e6 < least:
            break
        say(f"{micros / 1e6:8.2f}  {package}\n")


def main() -> None:
    """Run what is asked, and print the parts."""
    if sys.argv[1:2] == ["--sample-into"]:
        trace(Path(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs", nargs="+", choices=["convert", "first", "again"], default=["convert", "first", "again"]
    )
    parser.add_argument("--params", help="as for kedro run")
    parser.add_argument("--least", type=float, default=0.3, help="seconds; smaller parts are not shown")
    parser.add_argument("--imports", action="store_true", help="run once more for the time of imports")
    parser.add_argument("--plain", action="store_true", help="no sampling: wall times and log lines alone")
    parser.add_argument("--processor", action="store_true", help="count the main thread's processor time instead")
    parser.add_argument("--model", type=Path, help="a converted model's folder to start from, instead of converting it")
    options = parser.parse_args()
    if options.processor:
        os.environ[IN_PROCESSOR_TIME] = "1"
    walls = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "project"
        folder.mkdir()
        scratch = Scratch(folder, options.params)
        if options.model:
            shutil.copytree(options.model, folder / MODEL / options.model.name)
        for kind in options.runs:
            if kind != "again":
                scratch.forget(with_model=kind == "convert")
            stacks = Path(temporary) / "stacks.json"
            say(f"\n== {kind}: kedro {' '.join(scratch.arguments)}\n")
            traced = [sys.executable, __file__, "--sample-into", str(stacks)]
            taken, processor, _ = scratch.run([sys.executable, "-m", "kedro"] if options.plain else traced, told=True)
            walls.append(f"{kind} {taken:.1f} s (processor {processor:.1f} s)")
            if not options.plain:
                whole = Part()
                for row in json.loads(stacks.read_text()):
                    whole.add(row["stack"], row["seconds"])
                say(f"-- {kind}: {taken:.2f} s, main thread {whole.seconds:.2f} s, parts over {options.least} s\n")
                whole.show(options.least)
        if options.imports:
            *_, text = scratch.run([sys.executable, "-X", "importtime", "-m", "kedro"], told=False)
            show_imports(text, options.least / 3)
    say(f"wall: {', '.join(walls)}\n")


if __name__ == "__main__":
    main()
