"""Decide what the columns of a file mean: which format the rows have, and which column plays which part."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from lm_tuning.data.check.findings import list_columns
from lm_tuning.data.format.conventions import (
    CAUSAL_LM,
    CONTENT_NAMES,
    MESSAGES,
    OPTIONAL_NAMES,
    PROMPT_RESPONSE,
    SEQ2SEQ_LM,
    SEQUENCE_CLASSIFICATION,
    TEXT,
    TEXT_LABEL,
    ColumnMapping,
    find_conventions,
    find_format_problem,
    template_columns,
)
from lm_tuning.errors import UserError
from lm_tuning.parameters.data import DataParameters

logger = logging.getLogger(__name__)

FORMATS = (TEXT, PROMPT_RESPONSE, MESSAGES, TEXT_LABEL)

_NEEDED_PARTS: Mapping[str, tuple[str, ...]] = {
    TEXT: ("text",),
    PROMPT_RESPONSE: ("prompt", "response"),
    MESSAGES: ("messages",),
    TEXT_LABEL: ("text", "label"),
}
# What a template renders, for the formats that can have one.
_RENDERED_PART: Mapping[str, str] = {TEXT: "text", PROMPT_RESPONSE: "prompt", TEXT_LABEL: "text"}


# Comparing a name with very many others takes longer than a suggestion is worth.
_MAX_COMPARED = 1000


@dataclass(frozen=True)
class Header:
    """The columns of a file, and what it can say of those that it lacks.

    Attributes:
        columns: their names, in the order of the file.
        path: the file, as messages name it.
        explain: says more about a column that is not there, see ``RowSource.explain_missing``.
        inside: says how values inside the columns are named, see ``RowSource.describe_inside``.
    """

    columns: Sequence[str]
    path: str
    explain: Callable[[str], str] = lambda column: ""
    inside: Callable[[], str] = lambda: ""

    def missing(self, key: str, column: str, *, is_explained: bool = True) -> str:
        """Write the message for a column that is not there.

        Args:
            key: the parameter that names it.
            column: its name.
            is_explained: add what is there instead.
        """
        more = self.explain(column) if is_explained else ""
        nearest = get_close_matches(column, self.columns[:_MAX_COMPARED], n=1)
        suggestion = f" Did you mean {nearest[0]!r}?" if nearest and "Did you mean" not in more else ""
        return (
            f"{key} names the column {column!r}, which {self.path} does not have.{suggestion} "
            f"Its columns: {list_columns(self.columns)}.{more}"
        )


def choose_mapping(header: Header, data: DataParameters, *, task: str = CAUSAL_LM) -> ColumnMapping:
    """Decide on format and columns from what the user says and, where that is nothing, from the column names.

    Args:
        header: the columns of the file.
        data: ``format``, where ``auto`` finds it out, ``columns`` and ``template``.
        task: text with a label is only chosen by itself for ``sequence_classification``.

    Returns:
        The mapping; every column in it is available.

    Raises:
        UserError: columns that are not there, parts that are missing or do not go together, a template that does not
            parse, names that fit no format, or a format that the task cannot learn from.
    """
    given = data.columns.model_dump(exclude_none=True)
    # Anything that is said switches conventions off altogether: half of a mapping that is guessed is worse than an
    # error.
    if given or data.template is not None:
        mapping = _given_mapping(given, data.template, data.format, header, task=task)
    else:
        mapping = _conventional_mapping(header, format=data.format, task=task)
    problem = find_format_problem(mapping.format, task=task, path=header.path)
    if problem:
        raise UserError(problem)
    check_mapping(mapping, header)
    return mapping


def check_mapping(mapping: ColumnMapping, header: Header) -> None:
    """Refuse a mapping that names columns which a file does not have.

    Args:
        mapping: see ``choose_mapping``.
        header: the columns of the file.

    Raises:
        UserError: naming each column, its parameter, the nearest name and the columns that are there.
    """
    origin = f" (read off the column names of {mapping.read_off})" if mapping.read_off else ""
    named = [(f"data.columns.{part}{origin}", column) for part, column in mapping.columns.items()]
    if mapping.template:
        named += [("data.template", column) for column in template_columns(mapping.template)]
    problems = [header.missing(key, column) for key, column in named if column not in header.columns]
    if problems:
        raise UserError(problems)


def _given_mapping(
    given: dict[str, str], template: str | None, wanted: str, header: Header, *, task: str
) -> ColumnMapping:
    """Build the mapping from the parameters; a needed part that they leave out may bear its own name in the file."""
    problems: list[str] = []
    if template is not None:
        try:
            template_columns(template)
        except ValueError as error:
            problems.append(f"data.template: {error}")
            template = ""  # stands for one that parses, so that the other problems are found as well
    chosen = wanted if wanted != "auto" else _format_of(set(given), task=task)
    if chosen is None:
        listed = [f"data.columns.{part}" for part in given] + ["data.template"] * (template is not None)
        problems.append(f"No format follows from {' and '.join(listed)} alone. {_WAYS}")
        raise UserError(problems)
    rendered = _RENDERED_PART.get(chosen)
    if template is not None and rendered is None:
        problems.append(f"data.template cannot be used with the format {chosen!r}; set it to null.")
    if template is not None and rendered in given:
        problems.append(
            f"data.template and data.columns.{rendered} both say what the {rendered} is. Set one of them to null."
        )
    # Columns of the very name of a part need not be named.
    for part in _NEEDED_PARTS[chosen]:
        if part in given or (template is not None and part == rendered):
            continue
        if part in header.columns:
            given = {**given, part: part}
        else:
            problems.append(
                f"The format {chosen!r} needs data.columns.{part}: the column that holds the {part}. Columns that are "
                f"there: {list_columns(header.columns)}.{header.inside()}"
            )
    allowed = (*_NEEDED_PARTS[chosen], *OPTIONAL_NAMES.get(chosen, ()))
    problems += [
        f"data.columns.{part} has no use in the format {chosen!r}; set it to null."
        for part in given
        if part not in allowed
    ]
    if problems:
        raise UserError(problems)
    return ColumnMapping(chosen, {part: given[part] for part in allowed if part in given}, template)


def _format_of(parts: set[str], *, task: str) -> str | None:
    """Tell the format from the parts that were given, and where they leave it open from the task."""
    if "messages" in parts:
        return MESSAGES
    if "response" in parts or "prompt" in parts:
        return PROMPT_RESPONSE
    if "label" in parts or task == SEQUENCE_CLASSIFICATION:
        return TEXT_LABEL
    if "text" in parts:
        return TEXT
    return PROMPT_RESPONSE if task == SEQ2SEQ_LM else None


def _conventional_mapping(header: Header, *, format: str, task: str) -> ColumnMapping:
    """Find the one format whose usual column names are all there, and say what is read as what."""
    found = find_conventions(header.columns, format=format, task=task)
    has = f"{header.path} has the columns {list_columns(header.columns)}"
    if not found:
        asked = "a format" if format == "auto" else f"the format {format!r}"
        raise UserError(f"{has}; no usual names of {asked} are there.{header.inside()} {_WAYS}")
    if len(found) > 1:
        listed = "; or ".join(f"{_describe_convention(one)} ({one.format})" for one in found)
        keys = list(dict.fromkeys(f"data.columns.{part}" for one in found for part in one.columns))
        raise UserError(
            f"{has}, which can be read in {len(found)} ways: {listed}. Say which columns are meant: {', '.join(keys)}."
        )
    (convention,) = found
    optional = {part: part for part in OPTIONAL_NAMES.get(convention.format, ()) if part in header.columns}
    mapping = replace(convention, columns={**convention.columns, **optional}, read_off=header.path)
    _log_reading(mapping, header)
    return mapping


def _describe_convention(mapping: ColumnMapping) -> str:
    said = [f"{column!r} as the {part}" for part, column in mapping.columns.items()]
    if mapping.appended:
        said.insert(1, f"{mapping.appended!r} behind it")
    return ", ".join(said)


def describe_mapping(mapping: ColumnMapping) -> str:
    """Describe which column is read as what.

    Args:
        mapping: see ``choose_mapping``.
    """
    said = [f"{part} from {column!r}" for part, column in mapping.columns.items()]
    if mapping.template:
        listed = ", ".join(repr(column) for column in template_columns(mapping.template))
        said.insert(0, f"{_RENDERED_PART[mapping.format]} from the template with {listed or 'no column'}")
    if mapping.appended:
        said.insert(1, f"{mapping.appended!r} behind the prompt after an empty line")
    return ", ".join(said)


def _log_reading(mapping: ColumnMapping, header: Header) -> None:
    rest = [column for column in header.columns if column not in mapping.used_columns]
    telling = [column for column in rest if column.strip().lower() in CONTENT_NAMES]
    logger.log(
        logging.WARNING if telling else logging.INFO,
        "Read %s as %s, by the column names: %s%s.%s",
        header.path,
        mapping.format,
        describe_mapping(mapping),
        f"; not used: {list_columns(rest)}" if rest else "",
        f" If the model should see {list_columns(telling)}, put it into a data.template." if telling else "",
    )


_WAYS = (
    "Name the columns that hold the parts: data.columns.text; or data.columns.prompt and data.columns.response; or "
    "data.columns.messages; or data.columns.text and data.columns.label. data.template can render a prompt from "
    'several columns, such as "Summarize:\\n{dialogue}", next to data.columns.response.'
)
