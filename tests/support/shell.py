"""One process that runs many ``kedro`` commands one after another: starting takes longer than most of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.patience import PATIENCE_SECONDS

HEAVY = ("torch", "transformers", "datasets", "peft")

# Replies go to the process's first stdout; what a command prints, also from C code, goes to files.
_DRIVER = """
import json, os, sys, traceback
requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
for line in requests:
    request = json.loads(line)
    os.chdir(request["folder"])
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    sys.argv = ["kedro", *request["arguments"]]
    code = 0
    try:
        from kedro.framework.cli.cli import main
        main()
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    loaded = sorted(set(request["heavy"]) & set(sys.modules))
    print(json.dumps({"code": code, "loaded": loaded}), file=replies, flush=True)
"""


class Finished(NamedTuple):
    """How a command ended.

    Attributes:
        code: exit code.
        loaded: heavy packages that the process has imported by now.
        stdout: what it printed.
        stderr: what it printed there.
    """

    code: int
    loaded: list[str]
    stdout: str
    stderr: str


class Shell:
    """A process that waits for commands; use it as a context manager."""

    def __init__(self, scratch: Path, environment: Mapping[str, str]) -> None:
        """Start it.

        Args:
            scratch: an existing folder for what commands print.
            environment: variables of the process, all there are.
        """
        self._files = {name: scratch / f"shell-{name}.txt" for name in ("stdout", "stderr")}
        self._process: Any = subprocess.Popen(
            [sys.executable, "-c", _DRIVER],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=PATIENCE_SECONDS)
        self._process.stdout.close()

    def kedro(self, folder: Path, *arguments: str) -> Finished:
        """Run ``kedro`` with arguments in a folder.

        Args:
            folder: the working folder.
            *arguments: without ``kedro`` itself.
        """
        files = {name: str(path) for name, path in self._files.items()}
        request = {"folder": str(folder), "arguments": arguments, "heavy": HEAVY, **files}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        reply = self._process.stdout.readline()
        printed = {name: path.read_text(encoding="utf-8") for name, path in self._files.items()}
        assert reply, f"the process ended: {printed['stderr'][-6000:]}"
        return Finished(**json.loads(reply), **printed)
