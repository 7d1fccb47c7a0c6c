"""What is wrong with a tracking store, in words and by what can be done about it, and how long to wait for it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lm_tuning.errors import UserError
from lm_tuning.runtime.busy import read_ticks
from lm_tuning.secrets import MASK, mask

#: ``away``: try again later. ``denied``: a mistake of configuration, and try again later. ``refused``: the store works,
#: and will never take this.
Kind = Literal["away", "denied", "refused"]

_MAX_TEXT = 200
_DENIED = {401, 403}
_CLIENT_ERRORS = range(400, 500)
#: Worth another try, although the store says that the client is at fault.
_PASSING = {408, 425, 429}

#: What a database says whose making was broken off, or that another version of MLflow has made.
_HALF_MADE = ("_alembic_tmp_", "out-of-date database schema", "duplicate column name", "already exists\n[SQL")

_REASONS = (
    ("Connection refused", "it refuses the connection"),
    ("NameResolutionError", "its name is not known"),
    ("Name or service not known", "its name is not known"),
    ("getaddrinfo failed", "its name is not known"),
    ("Failed to resolve", "its name is not known"),
    ("timed out", "it does not answer"),
    ("RemoteDisconnected", "it closes the connection without an answer"),
    ("Connection aborted", "it breaks the connection off"),
    ("Connection reset", "it breaks the connection off"),
    ("No route to host", "there is no route to it"),
    ("Network is unreachable", "there is no network"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate cannot be verified"),
    ("not in a valid JSON format", "what answers there is no MLflow server"),
    ("database is locked", "another process holds the database"),
)


class Trouble(NamedTuple):
    """Why a tracking store did not take something.

    Attributes:
        kind: what can be done.
        text: the reason, half a sentence.
    """

    kind: Kind
    text: str


class StoreAway(Exception):  # not an error of ours, hence no Error in the name
    """Report that the tracking store takes nothing now.

    Attributes:
        trouble: why.
    """

    def __init__(self, trouble: Trouble) -> None:
        """Make the text of a trouble the message of the error."""
        self.trouble = trouble
        super().__init__(trouble.text)


def judge(error: BaseException) -> Trouble:
    """Read what MLflow or the network raised.

    Args:
        error: what a call has raised.
    """
    if isinstance(error, StoreAway):
        return error.trouble
    status = _status_of(error)
    text = describe(error)
    if status in _DENIED:
        return Trouble("denied", f"it refuses this user (HTTP {status}: {text})")
    # A value that MLflow's client refuses before any request is ours to blame, and the same tomorrow. Errors of the
    # network are OSErrors, and some of them ValueErrors as well.
    is_value = isinstance(error, TypeError | ValueError) and not isinstance(error, OSError | UserError)
    if is_value or (status in _CLIENT_ERRORS and status not in _PASSING):
        return Trouble("refused", text)
    return Trouble("away", text)


def describe(error: BaseException) -> str:
    """Describe in half a sentence what went wrong, without passwords.

    Args:
        error: what a call has raised.
    """
    text = strip_passwords(str(error))
    for pattern, reason in _REASONS:
        if pattern in text:
            return reason
    if found := re.search(r"(?:error code|too many) (5\d\d)", text):
        return f"it answers with error {found[1]}"
    if any(sign in text for sign in _HALF_MADE):
        return "its tables are half made, or of another version of MLflow: move the file away, or run mlflow db upgrade"
    # Database errors go on with the whole statement and its parameters.
    first = (text.strip().splitlines() or [type(error).__name__])[0]
    return first if len(first) <= _MAX_TEXT else first[: _MAX_TEXT - 3] + "..."


def strip_passwords(text: str) -> str:
    """Remove user and password from every address in a text, and mask what else in it is secret."""
    return mask(text).replace(f"://{MASK}@", "://")


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status behind an error of MLflow, or None."""
    from mlflow.exceptions import MlflowException

    if not isinstance(error, MlflowException):
        response = getattr(error, "response", None)
        return getattr(response, "status_code", None)
    status: Any = error.get_http_status_code  # MLflow annotates little of itself
    return int(status())


def describe_trouble(shown_uri: str, trouble: Trouble, folder: Path) -> str:
    """Return the message that the store is away, that the run goes on, and where its facts stay.

    Args:
        shown_uri: address of the store, without password.
        trouble: why.
        folder: of the journal.
    """
    if trouble.kind == "denied":
        fix = " Check MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN."
        first = f"MLflow at {shown_uri} does not let this run in: {trouble.text}.{fix}"
    else:
        first = f"MLflow at {shown_uri} is away: {trouble.text}."
    return (
        f"{first} The run goes on. What it has to tell is kept in {folder} and sent as soon as MLflow takes it; "
        "after the run, send it with: kedro send-tracking"
    )


def describe_silence(seconds: float, *, is_database: bool) -> str:
    """Describe in half a sentence that the store has not answered.

    Args:
        seconds: how long.
        is_database: whether the store is a database, and no server before one.
    """
    if is_database:
        return f"the database gave no answer for {seconds:.0f} seconds; another process may hold it"
    return f"it gave no answer for {seconds:.0f} seconds"


#: What counts as a sign of life of a thread inside of a call: its processor time, in hundredths of a second, and bytes
#: that the process has read. Where the system does not tell (other than Linux), there is none.
_LIFE_TICKS = 2
_LIFE_BYTES = 2**18
_LOOK_SECONDS = 0.05


def wait_patiently(
    condition: Callable[[], bool], life: Callable[[], object], patience_seconds: float, at_most_seconds: float | None
) -> tuple[bool, float]:
    """Wait for a condition while something changes.

    Args:
        condition: what is waited for.
        life: returns another value whenever whoever brings the condition about has got on.
        patience_seconds: how long it may return the same.
        at_most_seconds: the longest wait all the same; None waits on.

    Returns:
        Whether the condition came true, and the seconds that were waited.
    """
    last, began = life(), time.monotonic()
    now = since = began
    while not condition():
        time.sleep(_LOOK_SECONDS)
        # Looked at after the pause, not before: a process that was stopped in between, as on a busy machine, gets a
        # look at what has happened meanwhile before it counts the time as silence.
        now, new = time.monotonic(), life()
        if new != last:
            last, since = new, now
        if now - since >= patience_seconds or (at_most_seconds is not None and now - began >= at_most_seconds):
            return condition(), now - began
    return True, now - began


def work_of(thread: threading.Thread) -> tuple[int, int]:
    """Return what grows while a thread works: its processor time, and what the process has read, in coarse units."""
    ticks = read_ticks(Path(f"/proc/self/task/{thread.native_id}"), with_children=False)
    return (ticks // _LIFE_TICKS, _bytes_read() // _LIFE_BYTES)


def _bytes_read() -> int:
    """Return how many bytes this process has read so far, or 0 where the system does not say."""
    try:
        with open("/proc/self/io", "rb") as file:
            return int(file.readline().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
