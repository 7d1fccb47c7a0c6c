"""Rows are written as they come, in any order, and a later run goes on after the last whole one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lm_tuning.errors import MachineFault
from lm_tuning.storage.row_stream import RowStream
from tests.support.small_disk import mounted

KEY = "0123456789abcdef0123"


def opened(folder: Path, key: str = KEY) -> RowStream:
    return RowStream(folder, "predictions", key=key)


def test_rows_come_in_any_order_and_are_finished_in_that_of_their_numbers(tmp_path: Path) -> None:
    with opened(tmp_path) as stream:
        stream.append([{"row": 3, "text": "셋"}, {"row": 1, "text": "line\nbreak"}])
        stream.append([{"row": 2, "text": "\ud800"}])
        assert [row["row"] for row in stream.rows()] == [1, 2, 3]
        finished = stream.finish()
    lines = finished.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"row": 1, "text": "line\nbreak"},
        {"row": 2, "text": "\ud800"},
        {"row": 3, "text": "셋"},
    ]
    assert "셋" in lines[2]  # readable, and not \uXXXX


def test_a_later_run_of_the_same_key_goes_on(tmp_path: Path) -> None:
    with opened(tmp_path) as stream:
        stream.append([{"row": 5}, {"row": 2}])
    with opened(tmp_path) as stream:
        assert (len(stream), stream.num_resumed) == (2, 2)
        assert 5 in stream.done and 3 not in stream.done
        stream.append([{"row": 3}])
        assert stream.finish().read_text() == '{"row": 2}\n{"row": 3}\n{"row": 5}\n'


@pytest.mark.parametrize(
    "torn", ['{"row": 2, "te', '{"row": 2}', "\0\0\0\n", '{"row": 1}\n', '{"no": 2}\n{"row": 3}\n']
)
def test_what_is_torn_is_made_again(tmp_path: Path, torn: str, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as stream:
        stream.append([{"row": 1}])
    with stream.path.open("a") as file:
        file.write(torn)
    with opened(tmp_path) as stream:
        assert "incomplete" in caplog.text
        assert 1 in stream.done and 2 not in stream.done and 3 not in stream.done
        stream.append([{"row": 2}])
        assert stream.finish().read_text() == '{"row": 1}\n{"row": 2}\n'


def test_another_key_begins_again_and_removes_what_is_left_only_when_it_is_whole(tmp_path: Path) -> None:
    with opened(tmp_path, "a" * 20) as first:
        first.append([{"row": 1}])
    with opened(tmp_path) as stream:
        assert len(stream) == 0
        assert stream.others == [first.path]
        stream.append([{"row": 1}])
        assert first.path.is_file()
        stream.finish()
        assert not first.path.exists()


def test_a_killed_process_loses_nothing_that_it_appended(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom lm_tuning.storage.row_stream import RowStream\n"
        f"stream = RowStream(Path(sys.argv[1]), 'predictions', key={KEY!r})\n"
        "for row in range(100):\n    stream.append([{'row': row}])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, env=os.environ)
    assert killed.returncode == -9
    with opened(tmp_path) as stream:
        assert stream.num_resumed == 100


def test_no_row_comes_twice_and_no_number_is_missing_a_word(tmp_path: Path) -> None:
    with opened(tmp_path) as stream:
        stream.append([{"row": 1}])
        with pytest.raises(AssertionError, match="row 1 comes once"):
            stream.append([{"row": 1}])
        with pytest.raises(ValueError, match="JSON"):
            stream.append([{"row": 2, "log_prob": float("nan")}])


def test_a_full_disk_keeps_what_was_written_and_says_how_to_go_on(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "256k") as disk, opened(disk) as stream:
        stream.append([{"row": 1}])
        with pytest.raises(MachineFault, match=r"disk is full[\s\S]* 1 rows are kept[\s\S]* goes on from there"):
            stream.append([{"row": row, "text": "x" * 10_000} for row in range(2, 40)])
        stream.append([{"row": 2}])  # there is room for a short one
        assert stream.finish().read_text() == '{"row": 1}\n{"row": 2}\n'
