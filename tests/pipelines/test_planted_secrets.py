"""Secrets planted wherever a user can put one: nothing that a run prints or writes has them, and its rows are read."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.test_whole_run import Project
from tests.support.patience import PATIENCE_SECONDS
from tests.support.tracking_store import new_store

USER, PASSWORD, TOKEN = "bob", "Pw-planted-1", "tok-planted-2"
IN_PARAMETERS, IN_SHELL, OF_SERVER = "hf-planted-3", "hf-planted-4", "Srv-planted-5"
PLANTED = (PASSWORD, TOKEN, IN_PARAMETERS, IN_SHELL, OF_SERVER)
ALLOWED = f"Basic {base64.b64encode(f'{USER}:{PASSWORD}'.encode()).decode()}"


class _Rows(BaseHTTPRequestHandler):
    """Serves rows to who knows password and token, and refuses whatever a tracking server is asked."""

    rows = b""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_POST(self) -> None:
        self.send_error(403)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def _answer(self, *, with_body: bool) -> None:
        if self.headers["Authorization"] != ALLOWED or f"token={TOKEN}" not in self.path:
            self.send_error(401)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.rows)))
        self.send_header("ETag", '"1"')
        self.end_headers()
        if with_body:
            self.wfile.write(self.rows)


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Rows)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


class SecretProject(Project):
    """A project whose commands are processes of their own, as a shell with secrets starts them."""

    def kedro(self, *arguments: str, **variables: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "kedro", *arguments],
            cwd=self.folder,
            env={**self.environment, "HF_TOKEN": IN_SHELL, "PWD": str(self.folder), "COLUMNS": "150", **variables},
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        return done.returncode, done.stdout + done.stderr

    def arguments_for(self, host: str, *arguments: str, **params: object) -> list[str]:
        path = f"http://{USER}:{PASSWORD}@{host}/rows.jsonl?token={TOKEN}"
        given = {"data__path": path, "environment__variables__MY_API_KEY": IN_PARAMETERS, **params}
        return self.arguments(*arguments, **given)

    def files_with_secrets(self) -> list[str]:
        """Name the files that a run has left and that have a secret in them, in whatever form."""
        forms = [form for secret in PLANTED for form in (secret, base64.b64encode(secret.encode()).decode())]
        forms.append(ALLOWED.split()[1])
        return [
            f"{path.relative_to(self.folder)}: {form}"
            for path in self.folder.rglob("*")
            if path.is_file() and path.relative_to(self.folder).parts[0] not in ("conf", "src")
            for form in forms
            if form.encode() in path.read_bytes()
        ]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> SecretProject:
    project = SecretProject(tmp_path_factory.mktemp("secrets") / "project")
    _Rows.rows = (project.folder / "rows.jsonl").read_bytes()
    return project


def assert_nothing_leaked(project: SecretProject, printed: str) -> None:
    # Lines are broken at the width of a terminal.
    joined = "".join(printed.split())
    assert [secret for secret in PLANTED if secret in printed or secret in joined] == [], printed
    assert project.files_with_secrets() == []


def test_a_whole_run_reads_its_rows_and_leaks_nothing(project: SecretProject, host: str) -> None:
    (project.folder / "logs").mkdir(exist_ok=True)
    code, printed = project.kedro(*project.arguments_for(host))
    assert code == 0, printed[-6000:]
    assert_nothing_leaked(project, printed)
    assert f"http://***@{host}/rows.jsonl?token=***" in "".join(printed.split())
    assert "MY_API_KEY=***" in printed
    assert f"{project.folder}/data/06_models/smoke/tuned_model" in "".join(printed.split())
    run = project.mlflow_runs()[0]
    assert run.data.params["data.path"] == f"http://***@{host}/rows.jsonl?token=***"
    assert run.data.params["environment.variables.MY_API_KEY"] == "***"
    assert "data.path=http://***@" in run.data.tags["command"]
    assert run.data.tags["env.MY_API_KEY"] == "***"
    raw = json.loads((project.folder / "data/02_intermediate/smoke/raw_examples.json").read_text())
    assert raw["train"][0]["path"] == f"http://***@{host}/rows.jsonl?token=***"


def test_stored_descriptions_are_read_with_the_password_of_the_parameters(project: SecretProject, host: str) -> None:
    only_split = ("--pipelines=split", "--from-nodes=split.check_examples")
    code, printed = project.kedro(*project.arguments_for(host, *only_split))
    assert code == 0, printed
    assert "Rows reused" in printed, printed  # the same key, whatever the password
    for rows in (project.folder / "data/02_intermediate/smoke/rows").iterdir():
        if rows.is_dir() and rows.name[0] != ".":
            for file in rows.iterdir():
                file.unlink()
            rows.rmdir()
    code, printed = project.kedro(*project.arguments_for(host, *only_split, seed=7))
    assert code == 0, printed
    assert "Rows checked" in printed, printed
    code, printed = project.kedro(*project.arguments_for(host, "--pipelines=train", seed=7))
    assert code == 0, printed
    assert_nothing_leaked(project, printed)


def test_a_decoded_row_is_shown_without_the_secret_that_its_template_has(host: str, tmp_path: Path) -> None:
    project = SecretProject(tmp_path / "project")  # its own, since the rows that it stores have the template's words
    template = f'"By {IN_SHELL}, {IN_PARAMETERS}: {{question}}"'
    columns = {"data__template": template, "data__columns__response": "answer"}
    asked = project.arguments_for(host, "--pipelines=preflight", **columns)
    code, printed = project.kedro(*asked)
    assert code == 0, printed[-6000:]
    joined = "".join(printed.split())
    assert "By***,***:catnumber" in joined, printed
    assert [secret for secret in PLANTED if secret in joined] == [], printed
    for name in ("preflight.md", "preflight.html", "preflight.json"):
        stored = (project.folder / "data/08_reporting/smoke" / name).read_text()
        assert "By ***, ***: cat number" in stored, name
        assert [secret for secret in PLANTED if secret in stored] == [], name


def test_parameters_are_printed_without_secrets(project: SecretProject, host: str) -> None:
    arguments = project.arguments_for(host)
    code, printed = project.kedro("parameters", "--env", "smoke", *arguments[-2:])
    assert code == 0, printed
    assert_nothing_leaked(project, printed)
    assert "MY_API_KEY: '***'" in printed


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"data__path": f"http://{USER}:{TOKEN}@HOST/rows.jsonl"}, "data.path names 'http://***@HOST/rows.jsonl'"),
        ({"data__path": f"http://{USER}:{PASSWORD}@127.0.0.1:1/rows.jsonl"}, "data.path names 'http://***@127.0.0.1:1"),
        ({"data__format": f"http://{USER}:{PASSWORD}@HOST"}, "data.format = 'http://***@HOST'"),
        ({"data__path": f"ftp9://{USER}:{PASSWORD}@HOST/x.jsonl"}, "ftp9://***@HOST/x.jsonl"),
    ],
)
def test_an_error_names_no_secret(project: SecretProject, host: str, wrong: dict[str, str], message: str) -> None:
    given = {key: value.replace("HOST", host) for key, value in wrong.items()}
    code, printed = project.kedro(*project.arguments_for(host, "--pipelines=split", **given))
    assert code == 2, printed
    assert message.replace("HOST", host) in printed
    assert_nothing_leaked(project, printed)
    assert "***" in (project.folder / "logs/errors.log").read_text()


def test_a_mistyped_option_shows_no_secret(project: SecretProject, host: str) -> None:
    code, printed = project.kedro("run", "--env=smoke", f"--params=http://{USER}:{PASSWORD}@{host}")
    assert code == 2, printed
    assert_nothing_leaked(project, printed)


def test_a_crash_shows_its_traceback_without_secrets(project: SecretProject, host: str) -> None:
    nodes = project.folder / "src/lm_tuning/pipelines/tokenize/nodes.py"
    kept = nodes.read_text()
    kept_text = "    return base_model\n"
    nodes.write_text(kept.replace(kept_text, '    import os\n\n    raise RuntimeError(os.environ["SAY"])\n', 1))
    said = f"no http://{USER}:{PASSWORD}@{host}, {IN_SHELL} and {IN_PARAMETERS}"
    try:
        code, printed = project.kedro(*project.arguments_for(host), SAY=said)
    finally:
        nodes.write_text(kept)
    assert code == 1, printed
    assert f"RuntimeError: no http://***@{host}, *** and ***" in printed
    assert "Traceback" in printed
    assert_nothing_leaked(project, printed)
    failed = project.mlflow_runs()[0]
    assert failed.info.status == "FAILED"
    assert failed.data.tags["error"] == f"RuntimeError: no http://***@{host}, *** and ***"


def test_the_password_of_a_tracking_server_is_not_shown(project: SecretProject, host: str) -> None:
    uri = f"http://{USER}:{OF_SERVER}@{host}"
    variables = {"MLFLOW_TRACKING_URI": uri, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "2"}
    code, printed = project.kedro(*project.arguments_for(host, "--pipelines=split"), **variables)
    assert_nothing_leaked(project, printed)
    assert code in (0, 1, 2)


@pytest.fixture
def tracking_server(tmp_path: Path) -> Iterator[str]:
    """A real MLflow server, which takes no notice of a password."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = new_store(tmp_path / "server")
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", store, "--artifacts-destination", str(tmp_path / "artifacts")]
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            for _ in range(600):
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                    break
                assert process.poll() is None, (tmp_path / "server.log").read_text()
                time.sleep(0.5)
            yield f"127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


@pytest.mark.slow
def test_a_tracking_server_gets_no_secret_and_its_password_is_not_shown(
    project: SecretProject, host: str, tracking_server: str, tmp_path: Path
) -> None:
    uri = f"http://{USER}:{OF_SERVER}@{tracking_server}"
    code, printed = project.kedro(*project.arguments_for(host), MLFLOW_TRACKING_URI=uri)
    assert code == 0, printed[-6000:]
    assert_nothing_leaked(project, printed)
    from mlflow import MlflowClient

    client = MlflowClient(f"http://{tracking_server}")
    [run] = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert run.info.status == "FINISHED"
    assert run.data.params["data.path"] == f"http://***@{host}/rows.jsonl?token=***"
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"evaluation" in kept
    assert [secret for secret in PLANTED if secret.encode() in kept] == []
