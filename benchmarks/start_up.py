"""Compare the start of this project's commands with an empty Kedro project that has the same plugins.

    python benchmarks/start_up.py [--rounds 5]

In turns, each in a process of its own: ``kedro registry list`` in an empty project, ``kedro registry list`` here,
and a ``kedro run`` with a mistyped parameter here, against a mistyped pipeline there. Printed are the median seconds
of each and the differences. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
KEDRO = [sys.executable, "-m", "kedro"]


def seconds(arguments: list[str], folder: Path, *, exit_codes: tuple[int, ...] = (0,)) -> float:
    """Run a command to its end and return how long that took."""
    began = time.perf_counter()
    done = subprocess.run([*KEDRO, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    taken = time.perf_counter() - began
    if done.returncode not in exit_codes:
        raise RuntimeError(f"kedro {' '.join(arguments)} in {folder} gave {done.returncode}:\n{done.stderr[-2000:]}")
    return taken


def main() -> None:
    """Keep the times in turns and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as scratch:
        seconds(["new", "--name=empty", "--tools=none", "--example=n", "--telemetry=no"], Path(scratch))
        empty = Path(scratch) / "empty"
        commands: dict[str, tuple[list[str], Path, tuple[int, ...]]] = {
            "empty project, registry list": (["registry", "list"], empty, (0,)),
            "this project, registry list": (["registry", "list"], PROJECT, (0,)),
            "empty project, mistyped pipeline": (["run", "--pipelines=nothing"], empty, (0, 1, 2)),
            "this project, mistyped parameter": (["run", "--params", "train.lerning_rate=1"], PROJECT, (2,)),
        }
        for arguments, folder, exit_codes in commands.values():  # files are read from disk once
            seconds(arguments, folder, exit_codes=exit_codes)
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(rounds):
            for name, (arguments, folder, exit_codes) in commands.items():
                times[name].append(seconds(arguments, folder, exit_codes=exit_codes))
    medians = {name: statistics.median(values) for name, values in times.items()}
    say = sys.stdout.write
    for name, median in medians.items():
        say(f"{name}: {median:.2f} s (from {min(times[name]):.2f} to {max(times[name]):.2f})\n")
    say(
        "over the empty project: registry list "
        f"{medians['this project, registry list'] - medians['empty project, registry list']:+.2f} s\n"
    )


if __name__ == "__main__":
    main()
