"""The display: what a terminal shows, what a log says, what a call costs, what a fork inherits."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from rich.console import Console
from rich.logging import RichHandler

from lm_tuning import progress
from lm_tuning.errors import Interrupted
from lm_tuning.progress import ProgressDisplay, ignore_progress, show_progress
from lm_tuning.runtime.busy import LoadMonitor
from lm_tuning.runtime.stopping import forget_request, note_request
from tests.support.cost import count_calls
from tests.support.patience import PATIENCE_SECONDS


class Terminal(io.StringIO):
    """A stream that claims to be a terminal and can say what its screen would show."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """Return the lines on the screen after every cursor move and erasure."""
        rows: list[list[str]] = [[]]
        row = column = 0
        for token in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|[^\x1b]", self.getvalue()):
            if token == "\n":
                row, column = row + 1, 0
                if row == len(rows):
                    rows.append([])
            elif token == "\r":
                column = 0
            elif token.startswith("\x1b"):
                if token.endswith("A"):
                    row -= int(token[2:-1] or 1)
                    assert row >= 0, "the display moved above the screen's first line"
                elif token == "\x1b[2K":
                    rows[row] = []
            else:
                line = rows[row]
                line.extend(" " * (column + 1 - len(line)))
                line[column] = token
                column += 1
        return [text for text in ("".join(line).rstrip() for line in rows) if text]


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Terminal, RichHandler]]:
    """Log on an interactive Rich console, as Kedro does."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    handler = RichHandler(console=Console(file=stream, force_terminal=True, width=140), show_time=False)
    for other in (logging.getLogger(), logging.getLogger("kedro")):
        # A test that has started Kedro leaves its handler behind, whose console would be taken for the terminal.
        monkeypatch.setattr(other, "handlers", [kept for kept in other.handlers if not isinstance(kept, RichHandler)])
    logger = logging.getLogger("lm_tuning")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream, handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def message_of(line: str) -> str:
    """Return the message of a log line, without its level and source."""
    return line[9:].split("  ", maxsplit=1)[0]


class Load(LoadMonitor):
    """What a machine says of itself, made up."""

    def __init__(self, said: str | None = None) -> None:
        super().__init__()
        self.said = said

    def describe(self) -> str | None:
        return self.said


def quiet_display(clock: Clock, load: str | None = None) -> ProgressDisplay:
    display = ProgressDisplay(None, Console(file=io.StringIO()), clock=clock, load=Load(load))
    assert not display.is_live
    display.start(tick_in_background=False)
    return display


def test_a_request_to_stop_is_heard_at_the_next_sign_of_progress(clock: Clock) -> None:
    display = quiet_display(clock)
    display.on_progress("Training", 0, 40, "steps")
    note_request("SIGTERM")
    try:
        with pytest.raises(Interrupted, match="SIGTERM"):
            display.on_progress("Training", 1, 40, "steps")
    finally:
        forget_request()
    display.on_progress("Training", 1, 40, "steps")


def test_log_gets_a_line_per_open_bar_every_thirty_seconds(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lm_tuning.progress")
    display = quiet_display(clock)
    display.on_progress("Training", 0, 40, "steps")
    display.on_progress("Tokenizing", 0, None, "rows")
    for second in range(1, 91):
        clock.advance(1.0)
        if second % 10 == 0:
            display.on_progress("Training", second // 10, 40, "steps")
            display.on_progress("Tokenizing", second * 100, None, "rows")
        display.tick()
    assert caplog.messages == [
        "Training: 3/40 steps (8%), 0.1 steps/s, 6:10 min left",
        "Tokenizing: 3,000 rows, 100 rows/s",
        "Training: 6/40 steps (15%), 0.1 steps/s, 5:40 min left",
        "Tokenizing: 6,000 rows, 100 rows/s",
        "Training: 9/40 steps (22%), 0.1 steps/s, 5:10 min left",
        "Tokenizing: 9,000 rows, 100 rows/s",
    ]


def test_time_left_follows_the_last_minute_not_the_slow_start(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lm_tuning.progress")
    display = quiet_display(clock)
    display.on_progress("Training", 0, 200, "steps")
    clock.advance(100.0)  # the first step compiles
    display.on_progress("Training", 1, 200, "steps")
    for done in range(2, 102):
        clock.advance(1.0)
        display.on_progress("Training", done, 200, "steps")
        display.tick()
    assert caplog.messages[-1].startswith("Training: ")
    assert "1 steps/s" in caplog.messages[-1]
    caplog.clear()
    clock.advance(45.0)
    display.tick()
    assert caplog.messages == ["Training: 101/200 steps (50%), 1 steps/s, 54 s left, no change for 45 s"]
    caplog.clear()
    clock.advance(60.0)
    display.tick()
    assert caplog.messages[0].startswith("Training: 101/200 steps (50%), 1 steps/s, no change for "), "no 0 s left"


def test_what_keeps_the_processors_from_the_work_is_said_where_nothing_changes(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="lm_tuning.progress")
    display = quiet_display(clock, "other programs used 1.8 of the 2 processors of this run; end them")
    display.on_progress("Training", 0, 200, "steps")
    clock.advance(137.0)
    display.tick()
    assert caplog.messages == [
        "Training: 0/200 steps (0%), no change for 2:17 min: other programs used 1.8 of the 2 processors of this run; "
        "end them"
    ]
    caplog.clear()
    clock.advance(29.0)
    display.on_progress("Training", 1, 200, "steps")
    clock.advance(1.0)
    display.tick()
    assert len(caplog.messages) == 1
    assert "other programs" not in caplog.messages[0], "it goes on, and that was said"


def test_steps_that_are_slow_beside_other_programs_say_so_once(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lm_tuning.progress")
    display = quiet_display(clock, "other programs used 1.8 of the 2 processors of this run; end them")
    display.on_progress("Training", 0, 200, "steps")
    for done in range(1, 7):
        clock.advance(20.0)
        display.on_progress("Training", done, 200, "steps")
        clock.advance(1.0)
        display.tick()
    assert ["other programs" in message for message in caplog.messages] == [True, False, False]


def test_on_a_terminal_it_is_said_once(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lm_tuning.progress")
    console = Console(file=Terminal(), force_terminal=True, width=100)
    display = ProgressDisplay(None, console, clock=clock, load=Load("other programs used 1.8 of the 2 processors"))
    assert display.is_live
    display.on_progress("Training", 0, 200, "steps")
    for _ in range(4):
        clock.advance(31.0)
        display.tick()
    assert caplog.messages == [
        "Training: 0/200 steps (0%), no change for 31 s: other programs used 1.8 of the 2 processors"
    ]


def test_the_end_is_one_line_with_the_rate_of_what_was_done_here(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="lm_tuning.progress")
    display = quiet_display(clock)
    display.on_progress("Training", 20, 40, "steps")  # resumed at step 20
    clock.advance(10.0)
    display.on_progress("Training", 40, 40, "steps")
    display.on_progress("Training", 40, 40, "steps")
    display.on_progress("Nothing", 0, 0, "rows")
    clock.advance(5.0)
    display.on_progress("Training", 0, 40, "steps")  # again, a new bar
    clock.advance(3700.0)
    display.on_progress("Training", 40, 40, "steps")
    display.on_progress("Training", 41, 41, "steps")  # resumed at its end
    display.stop()
    assert caplog.messages == [
        "Training: 20 steps in 10 s, 2 steps/s; 40 with those before",
        "Nothing: 0 rows in 0.0 s",
        "Training: 40 steps in 1:01:40 h, 0.0108 steps/s",
        "Training: 41 steps, all done before",
    ]


def test_bars_left_open_say_where_they_stopped(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lm_tuning.progress")
    display = quiet_display(clock)
    display.on_progress("Training", 0, 40, "steps")
    display.on_progress("Reading", 0, None, "rows")
    clock.advance(4.0)
    display.on_progress("Training", 12, 40, "steps")
    display.on_progress("Reading", 4000, None, "rows")
    display.stop()
    display.on_progress("Training", 13, 40, "steps")
    display.on_progress("Training", 40, 40, "steps")
    assert caplog.messages == [
        "Training: stopped at 12/40 steps after 4.0 s",
        "Reading: 4,000 rows in 4.0 s, 1,000 rows/s",
    ]


def test_terminal_shows_open_bars_below_whole_log_lines(clock: Clock, terminal: tuple[Terminal, RichHandler]) -> None:
    stream, handler = terminal
    logger = logging.getLogger("lm_tuning.somewhere")
    display = ProgressDisplay(handler, handler.console, clock=clock)
    assert display.is_live
    display.start(tick_in_background=False)
    logger.info("before any bar")
    display.on_progress("Tokenizing", 0, 4000, "rows")
    display.on_progress("Counting", 0, None, "rows")
    display.tick()
    for done in (1000, 2000):
        clock.advance(10.0)
        display.on_progress("Tokenizing", done, 4000, "rows")
        display.tick()
        logger.info("read up to row %d", done)
    print("printed by somebody else")  # noqa: T201
    sys.stderr.write("a warning of a library\n")
    display.tick()
    screen = stream.screen()
    assert [message_of(line) for line in screen[:3]] == [
        "before any bar",
        "read up to row 1000",
        "read up to row 2000",
    ]
    assert screen[3:5] == ["printed by somebody else", "a warning of a library"]
    assert len(screen) == 7
    assert screen[5].startswith("Tokenizing")
    assert screen[5].endswith("2,000/4,000 rows  100 rows/s  20 s  20 s left")
    assert screen[6].startswith("Counting") and "0 rows" in screen[6]

    display.on_progress("Tokenizing", 4000, 4000, "rows")
    display.stop()
    logger.info("after")
    screen = stream.screen()
    assert [message_of(line) for line in screen[5:]] == [
        "Tokenizing: 4,000 rows in 20 s, 200 rows/s",
        "Counting: 0 rows in 20 s",
        "after",
    ]
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h") == 1, "the cursor came back"


def test_logging_from_threads_does_not_tear_the_display(terminal: tuple[Terminal, RichHandler]) -> None:
    stream, handler = terminal
    logger = logging.getLogger("lm_tuning.somewhere")
    display = ProgressDisplay(handler, handler.console)
    display.start(tick_in_background=False)
    done = threading.Event()

    def redraw() -> None:
        while not done.wait(0.001):  # without a pause it keeps the others from the lock, and nothing interleaves
            display.tick()

    def write(name: str) -> None:
        for number in range(20):
            display.on_progress(name, number % 2, 1, "rows")  # the number of bars changes all the time
            logger.info("%s says %d", name, number)

    threads = [threading.Thread(target=write, args=(name,)) for name in ("one", "two")]
    painter = threading.Thread(target=redraw)
    painter.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    painter.join()
    display.tick()
    display.stop()
    said = {f"{name} says {number}" for name in ("one", "two") for number in range(20)}
    lines = [message_of(line) for line in stream.screen()]
    assert said <= set(lines)
    assert len(lines) == 40 + 20, "one line a message and one a closed bar, and no rest of a bar between them"


def test_a_redraw_waits_for_the_log_line_that_is_being_written(terminal: tuple[Terminal, RichHandler]) -> None:
    stream, handler = terminal
    display = ProgressDisplay(handler, handler.console)
    display.start(tick_in_background=False)
    display.on_progress("Training", 1, 40, "steps")
    handler.acquire()
    painter = threading.Thread(target=display.tick)
    painter.start()
    painter.join(0.3)
    assert painter.is_alive()
    assert "Training" not in stream.getvalue()
    handler.release()
    painter.join()
    assert "Training" in stream.getvalue()
    display.stop()


def test_a_handler_on_the_bare_terminal_goes_through_the_display(
    terminal: tuple[Terminal, RichHandler], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, handler = terminal
    monkeypatch.setattr(sys, "stderr", stream)
    library = logging.getLogger("a_library")
    library.propagate = False
    raw = logging.StreamHandler(stream)
    library.addHandler(raw)
    try:
        display = ProgressDisplay(handler, handler.console)
        display.start(tick_in_background=False)
        display.on_progress("Training", 1, 40, "steps")
        display.tick()
        library.warning("a library warns")
        display.tick()
        screen = stream.screen()
        assert screen[0] == "a library warns"
        assert screen[1].startswith("Training") and len(screen) == 2
        display.stop()
        assert raw.stream is stream
    finally:
        library.removeHandler(raw)


def test_nested_use_shares_one_display_and_the_outermost_ends_it(
    terminal: tuple[Terminal, RichHandler],
) -> None:
    stream, _ = terminal
    with show_progress() as outer:
        outer("Training", 1, 40, "steps")
        with show_progress() as inner:
            assert inner == outer
            inner("Evaluating", 1, 2, "rows")
        assert progress._shared.display is not None
        deadline = time.monotonic() + PATIENCE_SECONDS
        while "1/2 rows" not in stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "1/2 rows" in stream.getvalue(), "the background thread draws bars of both"
        assert "1/40 steps" in stream.getvalue()
    assert progress._shared.display is None
    assert not [thread for thread in threading.enumerate() if thread.name == "lm-tuning-progress"]


def test_the_display_ends_when_the_work_fails(terminal: tuple[Terminal, RichHandler]) -> None:
    stream, _ = terminal
    with pytest.raises(RuntimeError), show_progress() as on_progress:
        on_progress("Training", 12, 40, "steps")
        raise RuntimeError("out of memory")
    assert "Training: stopped at 12/40 steps" in stream.screen()[-1]
    assert not isinstance(sys.stdout, progress.FileProxy)


def test_a_pipe_gets_no_cursor_moves_even_with_forced_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    console = Console(file=io.StringIO())
    assert console.is_terminal
    assert not ProgressDisplay(None, console).is_live


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_worker_neither_hangs_nor_draws(terminal: tuple[Terminal, RichHandler]) -> None:
    stream, _ = terminal
    with show_progress() as on_progress:
        on_progress("Training", 1, 40, "steps")
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(PATIENCE_SECONDS)
            stream.seek(0)
            stream.truncate()
            logging.getLogger("lm_tuning.worker").info("hello from a worker")
            on_progress("Training", 2, 40, "steps")
            with show_progress() as own:
                own("Own", 0, 1, "rows")
                own("Own", 1, 1, "rows")
            text = " ".join(stream.screen())
            os.write(writer, text.encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
    assert status == 0, "the worker hung or failed"
    assert "hello from a worker" in text
    assert "Own: 1 row in" in text
    assert "Training" not in text, "the worker drew the bars of its parent"


@pytest.mark.parametrize("what", ["live", "log"])
def test_a_call_only_notes_a_number(what: str, terminal: tuple[Terminal, RichHandler]) -> None:
    """Work calls it between two steps or rows; drawing and logging is left to another thread."""
    handler = terminal[1]
    console = handler.console if what == "live" else Console(file=io.StringIO())
    display = ProgressDisplay(handler if what == "live" else None, console)
    assert display.is_live == (what == "live")
    display.start()
    display.on_progress("Tokenizing", 0, 1000, "rows")
    calls = [count_calls(lambda: display.on_progress("Tokenizing", done, 1000, "rows")) for done in range(1, 1000)]  # noqa: B023
    display.stop()
    assert max(calls) <= 12


def test_ignoring_progress_is_a_callback_of_the_same_shape() -> None:
    assert ignore_progress("Tokenizing", 1, None, "rows") is None
