"""Show how far long work has come: live bars on a terminal, a line now and then in a log.

Domain functions take ``on_progress: OnProgress = ignore_progress`` and call it as often as they like; only nodes open a
display. A call costs about a microsecond, since it writes down a number and a background thread draws.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.logging import RichHandler
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lm_tuning.runtime.bars import LINE_EVERY_SECONDS, Bar, write_rate, write_seconds
from lm_tuning.runtime.busy import LoadMonitor
from lm_tuning.runtime.log_records import protect
from lm_tuning.runtime.stopping import stop_if_requested

logger = logging.getLogger(__name__)

#: ``(what, done, total, unit)``, for example ``("Tokenizing", 512, 4000, "rows")``. A new ``what`` opens a bar, ``done
#: == total`` closes it, a total of None means that nobody knows it yet. Begin with ``done`` at 0 (or where a resumed
#: run goes on), so that the rate counts only what was done since.
OnProgress = Callable[[str, int, int | None, str], None]

_LIVE_TICK_SECONDS = 0.25
_LOG_TICK_SECONDS = 1.0
_PLAIN_WIDTH = 200


def ignore_progress(what: str, done: int, total: int | None, unit: str) -> None:
    """Replace a display where nobody watches.

    Args:
        what: what is being done.
        done: units done so far.
        total: units in all; None when unknown.
        unit: plural noun of one unit.
    """


class ProgressDisplay:
    """Hold the open bars of this process and show them.

    On an interactive terminal all open bars are drawn live below the log; elsewhere each open bar logs a line every
    30 seconds. In both, a bar that ends logs one line, which therefore also stands in log files.
    """

    def __init__(
        self,
        handler: RichHandler | None,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
        load: LoadMonitor | None = None,
    ) -> None:
        """Prepare a display; nothing is shown before `start`.

        Args:
            handler: the logging handler that writes on ``console``, if there is one. Drawing takes turns with it.
            console: where to draw.
            clock: seconds that only grow.
            load: tells why nothing changes; by default from this machine.
        """
        self._clock = clock
        self._load = load or LoadMonitor()
        self._console = console
        # Leaf lock of the hot path: Rich is never called while it is held.
        self._lock = threading.Lock()
        # Held while drawing. It is the handler's own lock, so a log line and a redraw never mix their cursor moves.
        self._drawing = (handler.lock if handler is not None else None) or threading.RLock()
        self._open: dict[str, Bar] = {}
        self._ended: dict[str, tuple[int, int | None]] = {}
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._live: Live | None = None
        if _can_redraw(console):
            self._live = Live(get_renderable=self._render, console=console, auto_refresh=False, transient=True)

    @property
    def is_live(self) -> bool:
        """Whether bars are drawn live rather than logged."""
        return self._live is not None

    def on_progress(self, what: str, done: int, total: int | None, unit: str) -> None:
        """Write down how far ``what`` has come; see `OnProgress`.

        Raises:
            Interrupted: a signal had asked to stop, and a library took that for an error of its own.
        """
        stop_if_requested()
        if self._stopped.is_set():
            return
        now = self._clock()
        with self._lock:
            bar = self._open.get(what)
            if bar is None:
                if self._ended.get(what) == (done, total):
                    return  # the end, said twice
                bar = Bar(what, unit, total, done, done, now, now, now + LINE_EVERY_SECONDS)
                bar.take_sample()
                self._open[what] = bar
            elif done != bar.done:
                bar.done = done
                bar.changed_at = now
            bar.total = total
            if total is None or done < total:
                return
            del self._open[what]
            self._ended[what] = (done, total)
        logger.info("%s", bar.last_line(now))

    def start(self, *, tick_in_background: bool = True) -> None:
        """Begin to show bars.

        Args:
            tick_in_background: draw from a thread of its own; False leaves calling `tick` to the caller.
        """
        if self._live is not None:
            self._live.start()
            _redirect_raw_handlers(into_display=True)
        if tick_in_background:
            self._thread = threading.Thread(target=self._keep_ticking, name="lm-tuning-progress", daemon=True)
            self._thread.start()

    def tick(self) -> None:
        """Redraw the live bars, or log a line for each bar whose time has come."""
        if self._live is not None:
            with self._drawing:
                self._live.refresh()
        for line in self._lines_due():
            logger.info("%s", line)

    def _lines_due(self) -> list[str]:
        """Return the line of each bar whose time has come.

        What keeps the processors busy is said once, and again where nothing changes. Beside live bars there are no
        lines but the one that says it first.
        """
        now = self._clock()
        with self._lock:
            due = [bar for bar in self._open.values() if now >= bar.next_line_at]
            for bar in self._open.values():
                bar.take_sample()
            for bar in due:
                bar.next_line_at = now + LINE_EVERY_SECONDS
        if not due:
            return []
        load = self._load.describe()  # reads files, so outside of the lock of the hot path
        self._load.restart()
        lines = []
        with self._lock:
            for bar in due:
                if self._open.get(bar.what) is not bar:
                    continue  # it has ended meanwhile
                is_news = load is not None and not bar.is_load_told
                if self._live is None or is_news:
                    lines.append(bar.running_line(now, load if is_news or bar.is_idle(now) else None))
                bar.is_load_told = bar.is_load_told or is_news
        return lines

    def stop(self) -> None:
        """Remove the bars; bars that are still open log where they stopped."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            unfinished, self._open = list(self._open.values()), {}
        if self._live is not None:
            with self._drawing:
                self._live.stop()
            _redirect_raw_handlers(into_display=False)
        now = self._clock()
        for bar in unfinished:
            logger.info("%s", bar.last_line(now))

    def before_fork(self) -> None:
        """Wait until nothing is half drawn: a child must not inherit Rich's locks in the locked state."""
        self._drawing.acquire()
        self._lock.acquire()

    def after_fork_in_parent(self) -> None:
        """Release the locks that were held for the fork, so that bars are drawn again."""
        self._lock.release()
        self._drawing.release()

    def after_fork_in_child(self) -> None:
        """Leave the terminal to the parent: a worker's log line must not redraw the bars."""
        self._lock.release()
        with suppress(RuntimeError):  # `logging` has renewed the lock of its handler in the child already
            self._drawing.release()
        if self._live is not None and self._live.is_started:
            self._console.clear_live()
            self._console.pop_render_hook()
            _redirect_raw_handlers(into_display=False)
            for name in ("stdout", "stderr"):
                stream = getattr(sys, name)
                if isinstance(stream, FileProxy):
                    setattr(sys, name, stream.rich_proxied_file)

    def _keep_ticking(self) -> None:
        interval = _LOG_TICK_SECONDS if self._live is None else _LIVE_TICK_SECONDS
        while not self._stopped.wait(interval):
            self.tick()

    def _render(self) -> Table:
        now = self._clock()
        table = Table.grid(padding=(0, 2))
        with self._lock:
            bars = list(self._open.values())
            for bar in bars:
                bar.take_sample()
        for bar in bars:
            rate, left = bar.units_per_second(), bar.seconds_left(now)
            table.add_row(
                Text(protect(bar.what), style="bold"),
                ProgressBar(total=bar.total, completed=bar.done, width=30, pulse=bar.total is None),
                Text(bar.count(), style="progress.download"),
                Text("" if rate is None else write_rate(rate, bar.unit), style="progress.data.speed"),
                Text(write_seconds(now - bar.opened_at), style="progress.elapsed"),
                Text("" if left is None else f"{write_seconds(left)} left", style="progress.remaining"),
            )
        return table


def _can_redraw(console: Console) -> bool:
    # FORCE_COLOR makes Rich take a pipe for a terminal: colours are welcome there, cursor moves are not.
    is_terminal = getattr(console.file, "isatty", lambda: False)()
    return console.is_interactive and not console.is_dumb_terminal and is_terminal


def _all_handlers() -> Iterable[logging.Handler]:
    loggers = [logging.getLogger(), *logging.getLogger().manager.loggerDict.values()]
    return [handler for each in loggers if isinstance(each, logging.Logger) for handler in each.handlers]


def _find_console() -> tuple[RichHandler | None, Console]:
    """Return the handler and console that Kedro logs on, else a console on the error stream."""
    for name in (None, "kedro", "lm_tuning"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, RichHandler):
                return handler, handler.console
    return None, Console(stderr=True)


def keep_log_lines_whole() -> None:
    """Stop Rich from breaking log lines at column 80 where no terminal sets a width: in pipes, files and CI."""
    _, console = _find_console()
    if not console.is_terminal and not console.is_jupyter and "COLUMNS" not in os.environ:
        console.width = max(console.width, _PLAIN_WIDTH)


def _redirect_raw_handlers(*, into_display: bool) -> None:
    """Send handlers that hold the bare terminal (transformers has one) through the display, or give it back to them."""
    for handler in _all_handlers():
        if not isinstance(handler, logging.StreamHandler):
            continue
        if not into_display:
            if isinstance(handler.stream, FileProxy):
                handler.setStream(handler.stream.rich_proxied_file)
            continue
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, FileProxy) and handler.stream is stream.rich_proxied_file:
                handler.setStream(stream)


@dataclass
class _Shared:
    """The one display of this process and how many ``with`` blocks use it."""

    display: ProgressDisplay | None = None
    num_users: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)


_shared = _Shared()


@contextmanager
def show_progress() -> Iterator[OnProgress]:
    """Open the display of this process, or join the one that is open.

    Yields:
        the callback to hand to domain functions. It may be called from any thread, and does nothing once the last user
        has left.
    """
    with _shared.lock:
        if _shared.display is None:
            _shared.display = ProgressDisplay(*_find_console())
            _shared.display.start()
        display = _shared.display
        _shared.num_users += 1
    try:
        yield display.on_progress
    finally:
        with _shared.lock:
            if _shared.display is display:
                _shared.num_users -= 1
                if _shared.num_users == 0:
                    _shared.display = None
                    display.stop()


def _before_fork() -> None:
    _shared.lock.acquire()
    if _shared.display is not None:
        _shared.display.before_fork()


def _after_fork_in_parent() -> None:
    if _shared.display is not None:
        _shared.display.after_fork_in_parent()
    _shared.lock.release()


def _after_fork_in_child() -> None:
    if _shared.display is not None:
        _shared.display.after_fork_in_child()
    _shared.display, _shared.num_users = None, 0
    _shared.lock.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
