"""One scale for whatever is wrong: a problem with a row, an issue of a data set, a finding of a training.

Each of them has a record of its own, in the package that finds it, with the fields that are stored. Whoever lists,
counts or logs them needs no more than a `Notice`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

Severity = Literal["note", "warn", "stop"]
"""``note``: nothing wrong, but good to know. ``warn``: results will be worse than they need be, or look better than
they are. ``stop``: training refuses, ends, or is in vain."""

SEVERITIES: tuple[Severity, ...] = ("stop", "warn", "note")
"""The whole scale, the gravest first, as reports list it."""

SEVERITY_WORDS: Mapping[Severity, str] = {"stop": "stop", "warn": "warning", "note": "note"}
"""What reports call each; preflight stores these."""

LOG_LEVELS: Mapping[Severity, int] = {"note": logging.INFO, "warn": logging.WARNING, "stop": logging.ERROR}
"""How loud each is in the log."""


class Notice(Protocol):
    """Something that a user should know of.

    The members are read-only, so that frozen dataclasses and properties satisfy it alike.
    """

    @property
    def kind(self) -> str:
        """Short stable name that counts and settings go by, such as a health code."""

    @property
    def severity(self) -> Severity:
        """How grave it is."""

    @property
    def message(self) -> str:
        """What was found: whole sentences, with file and row or parameter."""

    @property
    def fix(self) -> str:
        """What to do about it: whole sentences; empty where the message says it."""


@dataclass(frozen=True)
class Issue:
    """A notice that has no more to it than a reader wants to know.

    Attributes:
        severity: how grave it is.
        kind: what it is about; preflight names the section of its report.
        message: what was found.
        fix: what to do about it.
    """

    severity: Severity
    kind: str
    message: str
    fix: str = ""


AnyNotice = TypeVar("AnyNotice", bound=Notice)


def gravest_first(notices: Iterable[AnyNotice]) -> list[AnyNotice]:
    """Sort by severity; those of one severity keep their order.

    Args:
        notices: of any kinds.
    """
    return sorted(notices, key=lambda notice: SEVERITIES.index(notice.severity))
