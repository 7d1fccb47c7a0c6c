"""The ways in which a run ends early with a message and no traceback."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lm_tuning.secrets import mask


class UserError(ValueError):
    """Report what a user can fix: bad parameters, bad rows, a missing file.

    The command line prints the problems alone, without a traceback, and exits with code 2.

    Attributes:
        problems: one sentence per problem, in the order in which a user would fix them.
    """

    def __init__(self, problems: str | Iterable[str]) -> None:
        """Keep the problems in order, with secrets masked: messages go to terminals, log files and tracking.

        Args:
            problems: one sentence, or several that are reported together.
        """
        self.problems = [mask(problem) for problem in ([problems] if isinstance(problems, str) else problems)]
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[UserError], tuple[list[str]]]:
        """Survive pickling between processes with the problems intact."""
        return (type(self), (self.problems,))


class MachineFault(UserError):
    """Report what the machine kept a run from, such as a full disk: nothing that was asked for is wrong."""


class GateNotReached(Exception):  # the run did all that it should, hence no Error in the name
    """Report that a model does not reach what ``evaluate.gate`` asks for, after every result was kept.

    The command line prints what is missed and exits with code 3.

    Attributes:
        missed: one sentence per bound, with the figure and the bound.
    """

    def __init__(self, missed: Iterable[str]) -> None:
        """Keep the bounds in the order of the gate.

        Args:
            missed: one sentence per bound.
        """
        self.missed = [mask(sentence) for sentence in missed]
        super().__init__("\n".join(self.missed))

    def __reduce__(self) -> tuple[type[GateNotReached], tuple[list[str]]]:
        """Survive pickling between processes with the sentences intact."""
        return (type(self), (self.missed,))


class Interrupted(Exception):  # a request to stop and no mistake, hence no Error in the name
    """Report that a signal asked the run to stop, after what could be kept was kept.

    It is an ``Exception`` so that Kedro calls its error hooks and the MLflow run is closed.

    Attributes:
        signal_name: ``SIGINT`` or ``SIGTERM``.
    """

    def __init__(self, signal_name: str, detail: str = "") -> None:
        """Name the signal and what was kept.

        Args:
            signal_name: ``SIGINT`` or ``SIGTERM``.
            detail: what was stored before stopping and how to go on; may be empty.
        """
        self.signal_name = signal_name
        self.detail = detail
        super().__init__(f"Stopped by {signal_name}. {detail}".strip())

    def __reduce__(self) -> tuple[type[Interrupted], tuple[str, str]]:
        """Survive pickling between processes with both parts intact."""
        return (type(self), (self.signal_name, self.detail))


def causes_of(error: BaseException | None, *, with_context: bool = False) -> Iterator[BaseException]:
    """Yield an error and what it says it was raised from, one after the other.

    Args:
        error: the last one; ``None`` yields nothing.
        with_context: also what was being handled when an error was raised that names no cause.
    """
    seen: set[int] = set()  # chains can be circular
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or (error.__context__ if with_context else None)
