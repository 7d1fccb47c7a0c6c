"""An output belongs to one run at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lm_tuning.errors import UserError
from lm_tuning.storage.locks import OutputLock, one_at_a_time
from tests.support.patience import PATIENCE_SECONDS

HOLD = """
import sys
import threading
from pathlib import Path
from lm_tuning.storage.locks import OutputLock
with OutputLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_second_holder_learns_who_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "default.lock"
    path.parent.mkdir()
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=rf"{path.parent}.*process {holder.pid} .*--params output="):
            OutputLock(path).acquire()
        holder.kill()
        holder.wait()
    with OutputLock(path):  # a killed holder blocks nobody
        assert str(os.getpid()) in path.read_text()


def test_lock_is_exclusive_within_a_process_and_comes_free(tmp_path: Path) -> None:
    first = OutputLock(tmp_path, subject="The output 'default'").acquire()
    assert first.path == tmp_path / ".lock"
    with pytest.raises(UserError, match="The output 'default' is in use"):
        OutputLock(tmp_path, subject="The output 'default'").acquire()
    first.release()
    first.release()
    with OutputLock(tmp_path):
        pass


def test_second_block_waits_for_the_first(tmp_path: Path) -> None:
    path, entered = tmp_path / "locks" / "store.lock", threading.Event()

    def enter() -> None:
        with one_at_a_time(path):
            entered.set()

    with one_at_a_time(path):
        thread = threading.Thread(target=enter)
        thread.start()
        assert not entered.wait(0.3)
    assert entered.wait(PATIENCE_SECONDS)
    thread.join()
