"""Find out what separates the fields of a CSV file, and ask where more than one answer is possible."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lm_tuning.data.readers.base import MAX_COLUMNS
from lm_tuning.errors import UserError
from lm_tuning.wording import count_of

logger = logging.getLogger(__name__)

AUTO = "auto"
_USUAL: Mapping[str, str] = {"csv": ",", "tsv": "\t"}
_KNOWN = (",", ";", "\t", "|")


@dataclass(frozen=True)
class Trial:
    """What the first records look like with one separator.

    Attributes:
        header: its fields.
        num_records: records looked at, the header not counted.
        num_other: how many of them have another number of fields than the header.
        error: why reading ended before; None where it did not.
    """

    header: list[str]
    num_records: int
    num_other: int
    error: UserError | None = None

    @property
    def fits(self) -> bool:
        """Return whether there are several fields, their names are different, and each record has as many."""
        is_named = all(name.strip() for name in self.header) and len(set(self.header)) == len(self.header) > 1
        return is_named and self.error is None and self.num_records > 0 and not self.num_other


def choose_delimiter(try_out: Callable[[str], Trial], *, path: str, file_format: str, given: str) -> str:
    """Return what separates the fields.

    The usual separator of the format is taken wherever its header has several fields; semicolons and tabs in the texts
    of such a file mean nothing. Only a header that is one field, or none that can be read, makes another separator
    possible: the one that gives every record as many fields as the header.

    Args:
        try_out: reads the first records with a separator.
        path: the file, for messages.
        file_format: ``csv`` or ``tsv``.
        given: ``data.delimiter``.

    Raises:
        UserError: several separators are possible, or the usual one can be read neither.
    """
    if given != AUTO:
        return "\t" if given == "tab" else given
    usual = _USUAL[file_format]
    # Not csv.Sniffer: it goes by how often a character occurs in a sample of text, so a file of prose with many
    # semicolons would be cut at these, and nobody would be told.
    first = try_out(usual)
    if first.fits or len(first.header) > MAX_COLUMNS:
        return usual
    others = {mark: trial for mark in _KNOWN if mark != usual and (trial := try_out(mark)).fits}
    # A header that could not even be read leaves as much open as one of a single field.
    is_one_field = len(first.header) < 2 or (first.error is not None and not first.num_records)
    # Told in the log, since a reader of the file cannot see which one was taken.
    if len(others) == 1 and is_one_field:
        (mark,) = others
        logger.info(
            "%s: read with %s between the fields, on which its header and %s agree; data.delimiter sets another",
            path,
            describe_delimiter(mark),
            count_of(others[mark].num_records, "row"),
        )
        return mark
    if others:
        named = " or ".join(describe_delimiter(mark) for mark in others)
        keys = " or ".join(f"data.delimiter: {_written(mark)}" for mark in (*others, usual))
        if is_one_field:
            num_records = next(iter(others.values())).num_records
            found = f"its header and first {count_of(num_records, 'row')} can be cut at {named}"
        elif first.error:
            found = f"with {describe_delimiter(usual)} it cannot be read ({first.error}), and with {named} it can"
        else:
            have = "has" if first.num_other == 1 else "have"
            found = (
                f"{first.num_other:,} of its first {count_of(first.num_records, 'row')} {have} another number of "
                f"fields than the header with {describe_delimiter(usual)}, and none with {named}"
            )
        raise UserError(f"{path} leaves open what separates its fields: {found}. Say which is meant: {keys}.")
    if first.error:
        # Nothing fits whole, but a header that falls into names by another separator is the best hint there is.
        likely = next((mark for mark in _KNOWN if mark != usual and _looks_cut(try_out(mark))), None)
        if likely is None:
            return usual  # reading it says what is wrong
        raise UserError(
            [
                *first.error.problems,
                f"{path}: the fields look separated by {describe_delimiter(likely)}, not by "
                f"{describe_delimiter(usual)}. If they are, set data.delimiter: {_written(likely)}.",
            ]
        )
    return usual


def describe_delimiter(mark: str) -> str:
    """Name a separator for a message.

    Args:
        mark: one character.
    """
    names = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": "a vertical bar"}
    return f"{names[mark]} ({mark!r})" if mark in names else repr(mark)


def _looks_cut(trial: Trial) -> bool:
    """Return whether a separator gives a header of several names, whatever the records are like."""
    return len(trial.header) > 1


def _written(mark: str) -> str:
    return "tab" if mark == "\t" else f'"{mark}"'
