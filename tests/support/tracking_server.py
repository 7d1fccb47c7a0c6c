"""A real MLflow server on loopback that can be told to misbehave, in a process of its own.

What it does is read from a file for each request: ``ok``, ``hang`` (takes the request and never answers), ``500``,
``junk`` (status 200 and a page), ``endless`` (an answer that never ends), ``drop`` (closes the connection), ``401``,
or ``ok hang <text>``, which hangs requests whose path holds the text and answers others.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

_HANG_SECONDS = 3600
_ENDLESS_SECONDS = 120


class TrackingServer:
    """Start, stop and restart the server; use it as a context manager.

    Attributes:
        uri: its address.
        store: address of the database behind it.
    """

    def __init__(self, folder: Path, store: str) -> None:
        """Choose a free port; nothing starts yet.

        Args:
            folder: an existing folder of the test's own, for artifacts, logs and the mode.
            store: tracking URI of an existing database.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.store = store
        self._folder = folder
        self._mode = folder / "mode.txt"
        self._process: subprocess.Popen[bytes] | None = None
        self.behave("ok")

    @property
    def mode_file(self) -> Path:
        """The file that the next request follows."""
        return self._mode

    def behave(self, mode: str) -> None:
        """Set what happens to requests from now on."""
        aside = self._mode.with_suffix(".new")
        aside.write_text(mode)
        aside.rename(self._mode)

    def start(self) -> None:
        """Start it and wait until it answers."""
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.tracking_server", self.store, str(self.port), str(self._folder)],
                cwd=Path(__file__).parents[2],
                env={key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")},
                stdout=log,
                stderr=log,
            )
        while True:
            try:
                urlopen(f"{self.uri}/health", timeout=5)
            except OSError:
                assert self._process.poll() is None, (self._folder / "server.log").read_text()
                time.sleep(0.2)
            else:
                return

    def kill(self) -> None:
        """End it without a word."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> TrackingServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _misbehave(app: Any, mode_file: Path) -> Callable[..., Iterable[bytes]]:
    """Wrap an application so that it follows the mode."""

    def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        mode, _, rest = mode_file.read_text().partition(" ")
        if environ["PATH_INFO"] == "/health":
            mode = "ok"
        elif rest:
            verb, _, text = rest.partition(" ")
            mode = verb if text in environ["PATH_INFO"] else mode
        if mode == "hang":
            time.sleep(_HANG_SECONDS)
        if mode == "drop":
            raise SystemExit
        if mode in {"500", "401"}:
            start_response(f"{mode} No", [("Content-Type", "text/plain")])
            return [b"no"]
        if mode == "junk":
            start_response("200 OK", [("Content-Type", "text/html")])
            return [b"<html>Please log in</html>"]
        if mode == "endless":
            start_response("200 OK", [("Content-Type", "application/json")])
            return _send_and_send(mode_file)
        answer: Iterable[bytes] = app(environ, start_response)
        return answer

    return serve


def _send_and_send(mode_file: Path) -> Iterator[bytes]:
    """Yield an answer that has no end before the mode changes, or two minutes are over."""
    began = time.monotonic()
    while mode_file.read_text() == "endless" and time.monotonic() - began < _ENDLESS_SECONDS:
        yield b" " * 2**18
        time.sleep(0.05)


def _main(store: str, port: str, folder: str) -> None:
    # As MLflow's own command hands them to its server; they are read when it is imported.
    os.environ |= {
        "_MLFLOW_SERVER_FILE_STORE": store,
        "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": f"{folder}/server-artifacts",
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
    }
    from mlflow.server import app
    from werkzeug.serving import make_server

    make_server("127.0.0.1", int(port), _misbehave(app, Path(folder) / "mode.txt"), threaded=True).serve_forever()


if __name__ == "__main__":
    _main(*sys.argv[1:])
