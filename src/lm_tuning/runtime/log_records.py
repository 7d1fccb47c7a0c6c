"""The one way from a log call to terminal and log file: secrets masked, foreign text as it is.

A record that Python's logging makes in this process carries this with it, so it holds for every handler and every
logging configuration: Kedro's own, the project's, a user's, and those that libraries bring along.
"""

from __future__ import annotations

import logging
import sys
import traceback
from types import TracebackType
from typing import Any

from lm_tuning.secrets import mask, remember_environment
from lm_tuning.wording import visible

_CONTINUATION = "\n  "


def protect(text: str) -> str:
    """Write a text for people to read: without secrets, and with control characters as escapes.

    Args:
        text: a message, which may have foreign text in it.
    """
    return visible(mask(text))


# A filter or formatter would hold for one handler; the factory holds for every record of the process, whoever logs it.
class PlainRecord(logging.LogRecord):
    """A log record whose text is taken literally, whatever is in it.

    Lines after the first are indented, so that a line break in a row cannot begin what looks like another record.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Make the record; the text of an error that has a secret in it is written down now, masked."""
        super().__init__(*args, **options)
        if self.exc_info and self.exc_info[1] is not None:
            text = "".join(traceback.format_exception(*self.exc_info)).rstrip("\n")
            if (protected := protect(text)) != text:
                # Formatters write this text as it stands; Rich would print the error itself.
                self.exc_text, self.exc_info = protected, None

    def getMessage(self) -> str:
        """Return the message with its arguments, for every handler."""
        return protect(super().getMessage()).replace("\n", _CONTINUATION)

    # Handlers ask a record for these two, and take their own setting where a record has no such attribute.
    @property
    def markup(self) -> bool:
        """Tell Rich that square brackets are square brackets; Kedro's handler takes them for styles otherwise."""
        return False

    @property
    def rich_format(self) -> None:
        """Have no styles for arguments, which Kedro's handler would write as markup."""
        raise AttributeError("rich_format")


def install_log_records() -> None:
    """Make every log record of this process a `PlainRecord`, and remember the secrets of its environment."""
    remember_environment()
    logging.setLogRecordFactory(PlainRecord)


def protect_tracebacks() -> None:
    """Print the traceback of an error that ends the process without secrets, plainly where it has any.

    Call it late: logging handlers put their own printer in place when they are made.
    """
    printer = sys.excepthook
    if getattr(printer, "is_protected", False):
        return  # a second command in the same process

    def print_protected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        protected = protect(text)
        if protected == text:
            printer(kind, error, trace)
        else:
            sys.stderr.write(protected)

    print_protected.is_protected = True  # type: ignore[attr-defined]
    sys.excepthook = print_protected
