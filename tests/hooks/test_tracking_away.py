"""A run goes on without its tracking server, waits seconds for it at most, and tells it everything later."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests

from lm_tuning.errors import UserError
from lm_tuning.hooks import mlflow_run
from lm_tuning.hooks.locking import LOCK_FOLDER
from lm_tuning.hooks.mlflow_run import send_what_is_kept
from lm_tuning.storage.locks import one_at_a_time
from lm_tuning.tracking import address, sender, trouble
from lm_tuning.tracking.journal import JOURNAL_FOLDER, list_journals
from tests.support.patience import PATIENCE_SECONDS
from tests.support.shell import Shell
from tests.support.tiny_project import run_session
from tests.support.tracking_server import TrackingServer
from tests.support.tracking_store import history, new_store

PATIENCE = {"OPEN_PATIENCE_SECONDS": 1.0, "END_PATIENCE_SECONDS": 1.5}
"""Shorter than the product's, so that the tests are short."""


def hurry(monkeypatch: pytest.MonkeyPatch, *, at_start: bool = True) -> None:
    """Wait little for a server that is away. One that answers is given the time that a busy machine takes."""
    for name in PATIENCE if at_start else ["END_PATIENCE_SECONDS"]:
        monkeypatch.setattr(mlflow_run, name, PATIENCE[name])
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "3" if at_start else "60")


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a server that answers, however busy the machine is."""
    for name in PATIENCE:
        monkeypatch.setattr(mlflow_run, name, PATIENCE_SECONDS)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", str(round(PATIENCE_SECONDS)))
    monkeypatch.setattr(sender, "MAX_OPEN_SECONDS", PATIENCE_SECONDS)


def recover(server: TrackingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server answer again, and give it the time that a busy machine takes."""
    server.behave("ok")
    be_patient(monkeypatch)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrackingServer]:
    folder = tmp_path_factory.mktemp("server")
    with TrackingServer(folder, new_store(folder)) as server:
        yield server
        server.behave("ok")


@pytest.fixture
def server(started: TrackingServer, project: Path, monkeypatch: pytest.MonkeyPatch) -> TrackingServer:
    """The server, in good health, as the tracking store."""
    started.behave("ok")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", started.uri)
    monkeypatch.setenv("TINY_SERVER_FILE", str(started.mode_file))
    monkeypatch.delenv("TINY_SERVER", raising=False)
    be_patient(monkeypatch)
    return started


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said aloud; the first session of a process takes pytest's listeners away."""
    lines: list[str] = []
    for module in (mlflow_run, sender):
        for level in ("info", "warning"):
            monkeypatch.setattr(module.logger, level, lambda text, *values: lines.append(text % values))
    return lines


def runs(server: TrackingServer, experiment: str) -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(server.store)
    found = client.get_experiment_by_name(experiment)
    return list(client.search_runs([found.experiment_id])) if found else []


def everything(server: TrackingServer, run: Any) -> dict[str, Any]:
    """What a run holds, but for what differs from run to run."""
    from mlflow import MlflowClient

    client = MlflowClient(server.store)

    def files(folder: str | None = None) -> list[str]:
        root = Path(
            server.mode_file.parent / "server-artifacts" / run.info.experiment_id / run.info.run_id / "artifacts"
        )
        return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())

    names = client.get_run(run.info.run_id).data.metrics
    tags = {name for name in run.data.tags if not name.startswith("resume.")}
    return {
        "status": run.info.status,
        "name": run.info.run_name,
        "params": {k: v for k, v in run.data.params.items() if k != "tracking.experiment"},
        "metrics": {name: history(server.store, run.info.run_id, name) for name in names},
        "tags": tags,
        "files": files(),
    }


def run_in(project: Path, experiment: str, **tracking: Any) -> None:
    run_session(project, params={"tracking": {"experiment": experiment, **tracking}})


def kept(project: Path) -> list[Path]:
    return list_journals(project / JOURNAL_FOLDER)


def send(project: Path) -> tuple[list[str], list[str]]:
    """Do as ``kedro send-tracking`` does; a run of this process may still be inside of its last call."""
    said: list[str] = []
    while True:
        problems = send_what_is_kept(project, None, say=said.append)
        if not any("still goes on" in problem for problem in problems):
            return said, problems
        time.sleep(0.1)


class Wait(NamedTuple):
    """A wait in vain.

    Attributes:
        patience_seconds: how long the store may show no sign of life.
        seconds: how long it took on this machine, signs of life included.
        num_silent_looks: how often it was looked at after its last sign of life.
    """

    patience_seconds: float
    seconds: float
    num_silent_looks: int


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[Wait]:
    """Every wait in vain for the store, at the start or at the end of a run."""
    noted: list[Wait] = []

    def wait(condition: Any, life: Any, patience_seconds: float, at_most_seconds: float | None) -> tuple[bool, float]:
        seen: list[object] = []

        def look() -> object:
            seen.append(life())
            return seen[-1]

        came_true, seconds = trouble.wait_patiently(condition, look, patience_seconds, at_most_seconds)
        if not came_true:
            silent = list(itertools.takewhile(lambda value: value == seen[-1], reversed(seen)))
            noted.append(Wait(patience_seconds, seconds, len(silent) - 1))
        return came_true, seconds

    monkeypatch.setattr(sender, "wait_patiently", wait)
    return noted


@pytest.fixture
def askers(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the threads that have sent a request."""
    names: set[str] = set()
    request = requests.Session.request

    def noted(session: Any, *args: Any, **options: Any) -> Any:
        names.add(threading.current_thread().name)
        return request(session, *args, **options)

    monkeypatch.setattr(requests.Session, "request", noted)
    return names


def check_patience(waits: list[Wait], said: list[str]) -> None:
    """Check that no wait went on after its patience had ended, and that the run says what they took.

    Not by a limit in seconds: a look takes as long as the machine takes, and a busy one makes fewer of them.
    """
    assert len(waits) <= 2, "at the start and at the end"
    for wait in waits:
        assert wait.patience_seconds in {mlflow_run.OPEN_PATIENCE_SECONDS, mlflow_run.END_PATIENCE_SECONDS}
        assert wait.num_silent_looks <= wait.patience_seconds / trouble._LOOK_SECONDS + 1
    assert waited(said) == round(sum(wait.seconds for wait in waits))


def waited(said: list[str]) -> float:
    (line,) = [line for line in said if "Send them later" in line]
    return float(re.search(r"waited (\d+) s", line)[1])  # type: ignore[index]


def test_a_healthy_server_shows_a_run_as_before(server: TrackingServer, project: Path, said: list[str]) -> None:
    run_in(project, "healthy")
    (run,) = runs(server, "healthy")
    assert run.info.status == "FINISHED"
    assert any(line == f"Started MLflow run 'all default' ({run.info.run_id})." for line in said)
    assert list((project / JOURNAL_FOLDER).iterdir()) == []
    assert history(server.store, run.info.run_id, "train/loss") == [(1, 3.0), (2, 2.0)]
    assert "reports/evaluation.json" in everything(server, run)["files"]


@pytest.mark.parametrize(
    "case",
    [
        *(("start", mode) for mode in ("hang", "500", "junk", "drop", "401")),
        *(("train", mode) for mode in ("hang", "500", "junk")),
        *(("evaluate", mode) for mode in ("hang", "drop")),
    ],
    ids=" ".join,
)
def test_a_server_that_is_away_costs_seconds_and_is_told_later(
    server: TrackingServer,
    project: Path,
    said: list[str],
    *,
    waits: list[Wait],
    askers: set[str],
    monkeypatch: pytest.MonkeyPatch,
    case: tuple[str, str],
) -> None:
    at, mode = case
    run_in(project, "healthy again")
    (undisturbed,) = runs(server, "healthy again")[:1]
    said.clear()
    experiment = f"{at} {mode}"
    hurry(monkeypatch, at_start=at == "start")
    if at == "start":
        server.behave(mode)
    else:
        monkeypatch.setenv("TINY_SERVER", f"{at} {mode}")
    shutil.rmtree(project / "data/default")
    askers.clear()
    run_in(project, experiment)
    assert (project / "data/default/evaluation.json").is_file()
    assert askers, "somebody asks the server"
    assert threading.main_thread().name not in askers, "the run itself waits for no answer of the network"
    check_patience(waits, said)
    assert len(kept(project)) == 1
    if at == "start":
        assert any("away" in line or "does not let this run in" in line for line in said), said
    _, problems = send(project) if mode != "hang" else ([], ["it would take its time"])
    assert len(problems) == 1
    recover(server, monkeypatch)
    lines, problems = send(project)
    assert problems == []
    assert len(lines) == 1 and "of run 'all default'" in lines[0]
    assert kept(project) == []
    (run,) = runs(server, experiment)
    assert everything(server, run) == everything(server, undisturbed)
    assert send(project) == (["Nothing is kept: every run has told MLflow everything."], [])


def test_an_answer_without_end_keeps_no_run_from_its_nodes(
    server: TrackingServer, project: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that come in are signs of life, so patience alone would wait for as long as they come."""
    hurry(monkeypatch)
    monkeypatch.setattr(sender, "MAX_OPEN_SECONDS", 2.0)
    server.behave("endless")
    run_in(project, "endless")
    assert (project / "data/default/evaluation.json").is_file()
    assert waited(said) < 100, "the answer goes on for two minutes"
    recover(server, monkeypatch)
    assert send(project)[1] == []
    (run,) = runs(server, "endless")
    assert run.info.status == "FINISHED"


def test_nothing_at_all_answers(
    project: Path, said: list[str], monkeypatch: pytest.MonkeyPatch, server: TrackingServer
) -> None:
    hurry(monkeypatch)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://bob:secret@127.0.0.1:9")
    run_in(project, "nothing")
    assert any("http://127.0.0.1:9 is away: it refuses the connection" in line for line in said), said
    assert waited(said) == 0
    (folder,) = kept(project)
    assert "secret" not in "".join(path.read_text() for path in folder.glob("*.json*"))
    _, problems = send(project)
    assert len(problems) == 1 and "it refuses the connection" in problems[0] and "secret" not in problems[0]
    run_in(project, "nothing")
    _, problems = send(project)
    assert len(problems) == 2, problems


@pytest.mark.parametrize("mode", ["500", "hang"])
def test_a_run_that_must_be_tracked_is_refused_at_the_start(
    server: TrackingServer, project: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    server.behave(mode)
    with pytest.raises(UserError, match=r"tracking\.on_unreachable = stop: MLflow at http://127") as caught:
        run_in(project, "must", on_unreachable="stop")
    assert len(caught.value.problems) == 1
    assert kept(project) == []
    assert not (project / "data/default/raw_examples.json").exists()


@pytest.mark.parametrize("uri", ["htp://127.0.0.1:5000", "http://", "http://host:port", "127.0.0.1:5000"])
def test_an_address_that_is_none_is_a_users_error(project: Path, monkeypatch: pytest.MonkeyPatch, uri: str) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(UserError, match="MLFLOW_TRACKING_URI") as caught:
        run_session(project)
    assert uri in str(caught.value)


def test_a_resume_finds_its_run_whether_or_not_the_server_has_made_it(
    server: TrackingServer, project: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints that were written meanwhile hold the id that stands in for the run."""
    resume = {"tracking": {"experiment": "resumed"}, "train": {"resume": True}}
    hurry(monkeypatch)
    server.behave("500")
    monkeypatch.setenv("TINY_NODE", "raise")
    with pytest.raises(RuntimeError):
        run_in(project, "resumed")
    with pytest.raises(RuntimeError):  # still away: it goes on in the same journal
        run_session(project, pipelines=["train"], params=resume)
    with pytest.raises(UserError, match="on_unreachable"):
        run_session(project, pipelines=["train"], params={**resume, "tracking": {"on_unreachable": "stop"}})
    assert len(kept(project)) == 1, "a refused run costs nothing of the earlier ones"
    recover(server, monkeypatch)
    assert send(project)[1] == []
    (run,) = runs(server, "resumed")
    assert (run.info.status, run.data.tags["resume.count"]) == ("FAILED", "1")
    monkeypatch.delenv("TINY_NODE")
    run_session(project, pipelines=["train"], params=resume)
    (run,) = runs(server, "resumed")
    assert (run.info.status, run.data.tags["resume.count"]) == ("FINISHED", "2")
    assert kept(project) == []
    assert any(f"Going on with MLflow run 'all default' ({run.info.run_id})" in line for line in said)


def test_a_server_that_comes_back_while_the_run_goes_on_is_told_at_once(
    server: TrackingServer, project: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "BACK_OFF_SECONDS", (0.05, 0.1))
    server.behave("500")
    monkeypatch.setenv("TINY_SERVER", "train ok")
    run_in(project, "back again")
    (run,) = runs(server, "back again")
    assert run.info.status == "FINISHED"
    assert kept(project) == []
    assert any("answers; what was kept for it is sent" in line for line in said), said


def test_a_killed_server_takes_the_rest_after_its_restart(
    server: TrackingServer, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_in(project, "undisturbed")
    shutil.rmtree(project / "data/default")
    hurry(monkeypatch, at_start=False)
    monkeypatch.setattr(mlflow_run, "enter_run", lambda run: server.kill())  # the run has begun
    run_in(project, "killed")
    assert len(kept(project)) == 1
    server.start()
    assert send(project)[1] == []
    (killed,), (undisturbed,) = runs(server, "killed"), runs(server, "undisturbed")
    assert everything(server, killed) == everything(server, undisturbed)


def test_the_commands_run_and_send_tracking_say_what_they_did(
    server: TrackingServer, project: Path, tmp_path: Path
) -> None:
    server.behave("junk")
    with Shell(tmp_path, {**os.environ, "COLUMNS": "400", "DO_NOT_TRACK": "1"}) as shell:
        done = shell.kedro(project, "run", "--params", "tracking.experiment=commands")
        assert done.code == 0, done.stderr
        printed = done.stdout + done.stderr
        assert f"MLflow at {server.uri} is away: what answers there is no MLflow server." in printed
        assert "Send them later: kedro send-tracking (the run has waited 0 s for MLflow)." in printed
        done = shell.kedro(project, "send-tracking")
        assert done.code == 2
        assert "what answers there is no MLflow server" in done.stderr and "Traceback" not in done.stderr
        server.behave("ok")
        done = shell.kedro(project, "send-tracking")
        assert done.code == 0, done.stderr
        (run,) = runs(server, "commands")
        assert re.search(rf"Sent \d+ entries and 7 files of run 'all default' \({run.info.run_id}\)", done.stdout)
        assert "Nothing is kept" in shell.kedro(project, "send-tracking").stdout
    assert run.info.status == "FINISHED"


def test_a_store_that_holds_threads_of_its_own_does_not_keep_the_process(project: Path) -> None:
    """The interpreter waits for the workers of a pool when it ends; some artifact stores of MLflow have one."""
    environment = {**os.environ, "TINY_POOL": "1", "COLUMNS": "400", "DO_NOT_TRACK": "1"}
    command = [sys.executable, "-m", "kedro", "run"]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Send them later: kedro send-tracking" in done.stdout + done.stderr
    assert len(kept(project)) == 1


def test_a_database_that_another_process_holds_costs_seconds(
    project: Path, said: list[str], waits: list[Wait], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = new_store(tmp_path / "held")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    hurry(monkeypatch)
    holder = sqlite3.connect(store.removeprefix("sqlite:///"))
    holder.execute("BEGIN EXCLUSIVE")
    run_session(project)
    assert (project / "data/default/evaluation.json").is_file()
    assert any("the database gave no answer" in line for line in said), said
    check_patience(waits, said)
    holder.rollback()
    holder.close()


def test_another_run_that_makes_the_tables_costs_seconds(
    project: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    uri = os.environ["MLFLOW_TRACKING_URI"]
    with one_at_a_time(project / LOCK_FOLDER / address.lock_name(uri)):
        run_session(project)
    assert any("the database gave no answer" in line for line in said), said
    assert len(kept(project)) == 1


def test_the_whole_wait_is_bounded() -> None:
    assert mlflow_run.OPEN_PATIENCE_SECONDS + mlflow_run.END_PATIENCE_SECONDS <= 20
