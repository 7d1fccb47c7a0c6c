"""How often Python looks for reference cycles."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

from lm_tuning.runtime.threads import collect_rarely, heap_set_aside, restore_collection


def test_collection_is_rare_and_comes_back() -> None:
    restore_collection()
    usual = gc.get_threshold()
    collect_rarely()
    assert gc.isenabled()
    assert gc.get_threshold()[0] > usual[0]
    restore_collection()
    assert gc.get_threshold() == usual


def test_reading_the_settings_makes_it_rare() -> None:
    code = "import gc; usual = gc.get_threshold(); import lm_tuning.settings; assert gc.get_threshold() > usual"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_heap_that_is_set_aside_is_not_searched_and_comes_back() -> None:
    before = gc.get_freeze_count()
    with heap_set_aside():
        assert gc.get_freeze_count() > before
        circle: list[object] = []
        circle.append(circle)
        del circle
        assert gc.collect() >= 1
    assert gc.get_freeze_count() == 0


def test_the_end_of_the_interpreter_searches_nothing_but_closes_files(tmp_path: Path) -> None:
    code = """
import gc, sys, lm_tuning.settings
class Circle:
    def __init__(self): self.me = self
    def __del__(self): print("searched")
Circle()
file = open(sys.argv[1], "w")
file.write("kept")
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "file"], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert (tmp_path / "file").read_text() == "kept"


def test_a_file_that_cannot_be_written_at_the_end_is_said(tmp_path: Path) -> None:
    code = """
import resource, signal, sys, io, lm_tuning.settings
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
class Circle:
    def __init__(self): self.me, self.file = self, open(sys.argv[1], "w")
Circle().file.write(1000 * "x")
memory = io.TextIOWrapper(io.BytesIO())
memory.write("nowhere to go")
"""
    path = tmp_path / "file"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert f"{path} could not be written to its end: " in done.stderr
    assert "Traceback" not in done.stderr


def test_the_end_of_the_interpreter_waits_for_no_reader_of_a_pipe() -> None:
    code = """
import os, select, threading, lm_tuning.settings
reader, writer = os.pipe()
pipe = open(writer, "wb")
threading.Thread(target=pipe.write, args=[bytes(10_000_000)], daemon=True).start()
select.select([reader], [], [])
print("done", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "done\n"
