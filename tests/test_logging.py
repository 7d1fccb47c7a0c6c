"""conf/logging.yml, as Kedro applies it in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_SECONDS

SCRIPT = """
import logging
import kedro.framework.project  # reads conf/logging.yml
from lm_tuning.progress import keep_log_lines_whole
keep_log_lines_whole()
for name in ("lm_tuning.training", "kedro.runner", "kedro.io.data_catalog", "httpx", "some.library"):
    logging.getLogger(name).info("note of %s", name)
    logging.getLogger(name).warning("warning of %s", name)
logging.getLogger("lm_tuning").info("word " * 30 + "end")
import sys
from lm_tuning.progress import _find_console
handler, console = _find_console()
print(type(handler).__module__, console is handler.console, sorted({"torch", "transformers"} & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def output() -> str:
    project = Path(__file__).resolve().parents[1]
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "KEDRO_LOGGING_CONFIG")}
    command = [sys.executable, "-c", SCRIPT]
    return subprocess.run(
        command, cwd=project, env=environ, capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS
    ).stdout


def test_notes_are_ours_and_kedro_s_and_warnings_are_everybody_s(output: str) -> None:
    notes = {line.split("note of ")[1].strip() for line in output.splitlines() if "note of " in line}
    assert notes == {"lm_tuning.training", "kedro.runner"}
    assert output.count("warning of ") == 5


def test_a_long_line_is_whole_where_there_is_no_terminal(output: str) -> None:
    assert "word " * 30 + "end" in output


def test_progress_finds_the_console_that_kedro_logs_on(output: str) -> None:
    assert output.splitlines()[-1] == "kedro.logging True []"


def test_the_project_s_file_is_used_from_a_subfolder_too(tmp_path: Path) -> None:
    """Kedro looks for it from the working folder alone."""
    repository = Path(__file__).resolve().parents[1]
    for name in ("pyproject.toml", "conf", "src"):
        (tmp_path / name).symlink_to(repository / name)
    below = tmp_path / "notebooks"
    below.mkdir()
    program = (
        "import logging, kedro.framework.project, lm_tuning.settings\n"
        "for name in ('kedro.io.data_catalog', 'urllib3', 'lm_tuning'):\n"
        "    print(logging.getLevelName(logging.getLogger(name).level))\n"
    )
    environ = {name: value for name, value in os.environ.items() if name != "KEDRO_LOGGING_CONFIG"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=below, env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-3:] == ["WARNING", "WARNING", "INFO"]
