"""What ``preflight.json`` holds."""

from __future__ import annotations

from typing import TypedDict


class StoredIssue(TypedDict):
    """An issue; ``level`` is ``stop``, ``warning`` or ``note``, and ``section`` the key of a section of the report."""

    level: str
    section: str
    text: str
    advice: str
