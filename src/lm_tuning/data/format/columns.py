"""Decide what the columns of a file mean: which format the rows have, and which column plays which part.

Columns of usual names need no parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import product
from string import Formatter

from lm_tuning.data.check.findings import list_columns
from lm_tuning.errors import UserError
from lm_tuning.parameters.base import TASK_FORMATS
from lm_tuning.parameters.data import DataParameters

logger = logging.getLogger(__name__)

TEXT, PROMPT_RESPONSE, MESSAGES, TEXT_LABEL = "text", "prompt_response", "messages", "text_label"
FORMATS = (TEXT, PROMPT_RESPONSE, MESSAGES, TEXT_LABEL)
CAUSAL_LM, SEQUENCE_CLASSIFICATION, SEQ2SEQ_LM = "causal_lm", "sequence_classification", "seq2seq_lm"

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

_Part = tuple[str, str | None]


def parse_template(template: str) -> list[_Part]:
    """Cut a template into literal text and the column that follows it.

    Args:
        template: text with ``{column}`` placeholders; ``{{`` and ``}}`` stand for braces.

    Returns:
        Pairs of literal text and column name; the name is None where no column follows.

    Raises:
        ValueError: a brace is left open, a placeholder is empty, or it asks for more than a column.
    """
    try:
        # The grammar of str.format, whose rendering is never used: values must not be looked into by attributes, and
        # their own braces must stay.
        fields = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{error}. Write a brace that is meant as text twice: '{{{{' or '}}}}'.") from error
    parts: list[_Part] = []
    for literal, column, layout, conversion in fields:
        if column is not None and (layout or conversion):
            raise ValueError(f"the placeholder of {column!r} holds more than a column name, which is all it may hold.")
        if column is not None and not column.strip():
            raise ValueError("a placeholder is empty: write a column name between the braces.")
        parts.append((literal, column))
    return parts


def template_columns(template: str) -> list[str]:
    """Return the columns that a template names, each once, in order.

    Raises:
        ValueError: see ``parse_template``.
    """
    return list(dict.fromkeys(column for _, column in parse_template(template) if column is not None))


@dataclass(frozen=True)
class ColumnMapping:
    """What the columns mean.

    Attributes:
        format: ``text``, ``prompt_response``, ``messages`` or ``text_label``.
        columns: column by part: ``text``, ``prompt``, ``response``, ``system``, ``messages``, ``tools`` or ``label``.
        template: renders the prompt (or the text) from columns; None when a column holds it.
        appended: column whose text, where a row has any, goes behind the prompt after an empty line; None for none.
        read_off: the file whose column names said all this; None when parameters did.
    """

    format: str
    columns: dict[str, str] = field(default_factory=dict)
    template: str | None = None
    appended: str | None = None
    read_off: str | None = None

    @property
    def is_composed(self) -> bool:
        """Return whether the prompt, or the text, is made of columns and of fixed text between them."""
        return self.template is not None or self.appended is not None

    @property
    def used_columns(self) -> list[str]:
        """Name every column that is read, each once."""
        rendered = template_columns(self.template) if self.template else []
        appended = [self.appended] if self.appended else []
        return list(dict.fromkeys([*self.columns.values(), *rendered, *appended]))


def _pair(prompt: str, response: str, appended: str | None = None) -> ColumnMapping:
    return ColumnMapping(PROMPT_RESPONSE, {"prompt": prompt, "response": response}, appended=appended)


CONVENTIONS: Sequence[ColumnMapping] = (
    *(
        ColumnMapping(MESSAGES, {"messages": name})
        for name in ("messages", "conversations", "conversation", "dialog", "dialogs")
    ),
    _pair("prompt", "response"),
    _pair("prompt", "completion"),
    _pair("question", "answer"),
    *(_pair("instruction", name) for name in ("output", "response")),
    *(_pair("instruction", name, more) for name, more in product(("output", "response"), ("input", "context"))),
    _pair("input", "output"),
    *(
        _pair(source, target)
        for source, target in product(
            ("document", "article", "dialogue", "source", "input", "text"), ("summary", "highlights", "target")
        )
    ),
    *(
        ColumnMapping(TEXT_LABEL, {"text": text, "label": label})
        for text, label in product(("text", "sentence"), ("label", "labels", "category", "intent"))
    ),
    ColumnMapping(TEXT, {"text": "text"}),
)
"""Readings that need no parameters, by the usual names of columns."""

# Parts that are read as well when a column bears their name, by format.
OPTIONAL_NAMES: Mapping[str, tuple[str, ...]] = {PROMPT_RESPONSE: ("system",), MESSAGES: ("system", "tools")}

# Names of columns that a model probably should see: a warning says so when they are not used.
_CONTENT_NAMES = frozenset({"context", "passage", "background", "system", "instruction", "input", "tools"})


def _find_conventions(available: Sequence[str], *, format: str, task: str) -> list[ColumnMapping]:
    """Return the conventions that fit the columns of a file, more than one where they contradict each other.

    Of two that fit, the one that uses more columns wins where it uses all of the other's. Running text is what a file
    holds when nothing else fits, and classes are only looked for when they are the task or asked for. What the task
    cannot learn from gives way to what it can. Upper and lower case do not count.

    Args:
        available: the column names.
        format: the format that is asked for; ``auto`` for any.
        task: the ``task`` parameter.
    """
    by_name = {column.strip().lower(): column for column in available}
    has_classes = task == SEQUENCE_CLASSIFICATION
    asked = {format} if format != "auto" else {MESSAGES, PROMPT_RESPONSE, TEXT, *([TEXT_LABEL] if has_classes else [])}
    fitting = [one for one in CONVENTIONS if one.format in asked and by_name.keys() >= set(one.used_columns)]
    # A strict subset loses: instruction, input and output says more than input and output.
    best = [one for one in fitting if not any(set(one.used_columns) < set(other.used_columns) for other in fitting)]
    best = [one for one in best if one.format != TEXT] or best
    best = [one for one in best if one.format in TASK_FORMATS[task]] or best
    return [
        replace(
            one,
            columns={part: by_name[name] for part, name in one.columns.items()},
            appended=by_name[one.appended] if one.appended else None,
        )
        for one in best
    ]


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
    found = _find_conventions(header.columns, format=format, task=task)
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
    telling = [column for column in rest if column.strip().lower() in _CONTENT_NAMES]
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


_NEEDED = {
    SEQUENCE_CLASSIFICATION: "learns the class of a text, so rows need a text and a label: name their columns in "
    "data.columns.text (or write a data.template) and data.columns.label, with data.format: text_label",
    SEQ2SEQ_LM: "learns to turn one text into another, so rows need a prompt and a response: name their columns in "
    "data.columns.prompt (or write a data.template) and data.columns.response, with data.format: prompt_response",
}


def find_format_problem(format: str, *, task: str, path: str) -> str | None:
    """Describe why a task can do nothing with rows of a format, or return None.

    Args:
        format: see ``FORMATS``.
        task: the ``task`` parameter.
        path: the file or folder that the rows are in, as messages name it.
    """
    if format in TASK_FORMATS[task]:
        return None
    kind = "conversations" if format == MESSAGES else "rows"
    return f"{path} is read as {kind} of the format {format!r}, but task: {task} {_NEEDED[task]}."
