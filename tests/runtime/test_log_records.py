"""What every handler gets of a log call: the text itself, without secrets."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator

import pytest
from kedro.logging import RichHandler
from rich.console import Console

from lm_tuning.runtime.log_records import PlainRecord, protect_tracebacks
from lm_tuning.wording import visible
from tests.support.hostile import HOSTILE


@pytest.fixture
def streams() -> Iterator[tuple[logging.Logger, io.StringIO, io.StringIO]]:
    """A logger with Kedro's handler as Kedro makes it, and a plain one."""
    terminal, file = io.StringIO(), io.StringIO()
    logger = logging.getLogger("test-log-records")
    logger.propagate = False
    capturing = logging.captureWarnings
    hook = sys.excepthook
    rich = RichHandler(rich_tracebacks=True, console=Console(file=terminal, width=300))
    plain = logging.StreamHandler(file)
    plain.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    factory = logging.getLogRecordFactory()
    logging.setLogRecordFactory(PlainRecord)
    logger.handlers = [rich, plain]
    yield logger, terminal, file
    logging.setLogRecordFactory(factory)
    logger.handlers = []
    sys.excepthook = hook
    capturing(False)


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("extra", [{}, {"markup": True}, {"rich_format": ["dark_orange"]}])
def test_text_is_text(streams, text: str, extra: dict[str, object]) -> None:
    logger, terminal, file = streams
    logger.warning("label %r: %s", text, text, extra=extra)
    logger.warning(f"first {text}".replace("%", "%%") + "%s", "", extra=extra)
    for line in visible(text).split("\n"):
        assert line in terminal.getvalue()
        assert line in file.getvalue()
    assert "\x1b" not in terminal.getvalue() + file.getvalue()


def test_a_line_break_begins_no_record(streams) -> None:
    logger, _, file = streams
    logger.warning("row: %s", "a\nERROR forged")
    assert file.getvalue() == "WARNING row: a\n  ERROR forged\n"


def test_secrets_are_masked_in_message_and_traceback(streams) -> None:
    logger, terminal, file = streams
    try:
        raise OSError("http://bob:PLANTED@host refused")
    except OSError as error:
        logger.exception("read %s", "http://bob:PLANTED@host")
        logger.warning("failed: %s", error)
    for text in (terminal.getvalue(), file.getvalue()):
        assert "PLANTED" not in text
        assert "OSError: http://***@host refused" in text


def test_an_ordinary_traceback_is_left_to_the_handler(streams) -> None:
    logger, terminal, _ = streams
    try:
        raise OSError("plain")
    except OSError:
        logger.exception("read")
    assert "─ Traceback" in terminal.getvalue()


def test_the_last_traceback_has_no_secret(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    printed: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: printed.append(error[1]))
    protect_tracebacks()
    protect_tracebacks()  # once is enough
    plain, secret = ValueError("plain"), ValueError("http://bob:PLANTED@host")
    sys.excepthook(ValueError, plain, None)
    sys.excepthook(ValueError, secret, None)
    assert printed == [plain]
    assert "http://***@host" in capsys.readouterr().err
