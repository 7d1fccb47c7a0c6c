"""What a report is stored as."""

from __future__ import annotations

from typing import Any, TypedDict


class ReportSection(TypedDict):
    """A section of the data report, as its node makes it and its catalog entry keeps it.

    Attributes:
        facts: a record of each section's own, all that is known.
        metrics: the numbers among them that MLflow shows, by name.
        markdown: the same for people.
    """

    facts: Any
    metrics: dict[str, float]
    markdown: str
