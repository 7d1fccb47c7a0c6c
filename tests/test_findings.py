"""The one scale on which problems, issues and findings are graded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from lm_tuning.findings import LOG_LEVELS, SEVERITIES, Severity, gravest_first


@dataclass(frozen=True)
class Seen:
    kind: str
    severity: Severity
    message: str = "The reader should know."
    fix: str = ""


def test_the_gravest_come_first_and_equals_keep_their_order() -> None:
    seen = [Seen("a", "note"), Seen("b", "warn"), Seen("c", "stop"), Seen("d", "warn"), Seen("e", "note")]
    assert [notice.kind for notice in gravest_first(seen)] == ["c", "b", "d", "a", "e"]


def test_the_scale_is_whole_and_louder_the_graver() -> None:
    assert set(SEVERITIES) == set(get_args(Severity)) == set(LOG_LEVELS)
    levels = [LOG_LEVELS[severity] for severity in SEVERITIES]
    assert levels == sorted(levels, reverse=True)
