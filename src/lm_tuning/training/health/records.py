"""A finding, and what ``health.json`` holds, which a checkpoint's marker holds too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeAlias, TypedDict, cast

from lm_tuning.findings import Severity
from lm_tuning.parameters.health_codes import CODES

# A value of JSON. Facts are named where they are measured, many of them by the unit of the task's loss.
Fact: TypeAlias = str | int | float | bool | Sequence["Fact"] | Mapping[str, "Fact"] | None

Facts: TypeAlias = dict[str, Fact]


class FindingRecord(TypedDict):
    """One thing that is not as expected; see :class:`Finding`."""

    code: str
    measured: str
    expected: str
    cause: str
    change: str
    severity: Severity


class StoredHealth(TypedDict):
    """The report as far as a resume goes on with it."""

    facts: Facts
    findings: list[FindingRecord]


class HealthRecord(StoredHealth):
    """The whole report.

    ``run`` has the fields of :class:`lm_tuning.training.health.report.RunState`; ``seconds`` is what the checks took.
    """

    run: dict[str, str | None]
    seconds: float


# Names of parameters, layers and the like that a finding writes out.
SHOWN_NAMES = 5

OF_CODE: Severity = cast("Severity", "that of the code")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is not as expected.

    Attributes:
        code: stable name, one of :data:`lm_tuning.parameters.health_codes.CODES`.
        measured: what was seen.
        expected: what a sound run would have measured.
        cause: the likely cause.
        change: the parameter to change, or what to do.
        severity: ``note``, ``warn`` or ``stop``; the code's own unless given.
        is_fatal: whether the run could not go on with it: it would crash at the first such row. It stops whatever
            ``train.health.severity`` says.
    """

    code: str
    measured: str
    expected: str
    cause: str
    change: str
    severity: Severity = OF_CODE
    is_fatal: bool = False

    def __post_init__(self) -> None:
        """Keep the severity of the code where none is given."""
        if self.severity is OF_CODE:
            object.__setattr__(self, "severity", CODES[self.code].severity)

    @property
    def kind(self) -> str:
        """Return the code, by which settings and counts go."""
        return self.code

    @property
    def message(self) -> str:
        """Write what was seen in whole sentences."""
        return f"{self.measured}; expected {self.expected}. {self.cause}"

    @property
    def fix(self) -> str:
        """Return what to do about it."""
        return self.change

    def sentence(self) -> str:
        """Return the finding as one line: code, what was found, what to change."""
        return f"[{self.code}] {self.message} {self.change}".strip()

    @classmethod
    def from_json(cls, record: FindingRecord) -> Finding:
        """Return a finding as it was stored, perhaps by a version that kept more of it."""
        return cls(**cast("FindingRecord", {name: record.get(name) for name in FindingRecord.__annotations__}))

    def to_json(self) -> FindingRecord:
        """Return the finding as it is stored."""
        return cast("FindingRecord", {name: getattr(self, name) for name in FindingRecord.__annotations__})


Checks = ParamSpec("Checks")


def listing(check: Callable[Checks, Iterator[Finding]]) -> Callable[Checks, list[Finding]]:
    """Let a check yield what it finds, and run it to its end before anything is done about it.

    Args:
        check: yields findings.
    """

    @wraps(check)
    def listed(*args: Checks.args, **kwargs: Checks.kwargs) -> list[Finding]:
        return list(check(*args, **kwargs))

    return listed
