"""Read rows as prompts that wait for an answer: by the columns and the template that training rows are read by.

A prompt is rendered as a training row is, whose answer is a placeholder that is cut off again. So what a tuned model is
asked stands in the very tokens that it was trained on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from lm_tuning.data.check.findings import RowProblem, list_columns
from lm_tuning.data.format.columns import (
    CONVENTIONS,
    MESSAGES,
    OPTIONAL_NAMES,
    PROMPT_RESPONSE,
    SEQ2SEQ_LM,
    TEXT,
    TEXT_LABEL,
    ColumnMapping,
    Header,
    describe_mapping,
    template_columns,
)
from lm_tuning.data.format.examples import Example, example_reader
from lm_tuning.data.format.messages import ROLE_OF_NAME
from lm_tuning.data.records import Cell, Row
from lm_tuning.errors import UserError
from lm_tuning.parameters.data import DataParameters

logger = logging.getLogger(__name__)

PLACEHOLDER = "Yes"
"""Stands for the answer while a prompt is rendered: an ordinary word, which joins what is before it as answers do."""

# No file names a column so: private-use characters are in nobody's header.
_ANSWER_COLUMN = "\ue000answer\ue001"
_RENDERED: Mapping[str, str] = {TEXT: "text", PROMPT_RESPONSE: "prompt", MESSAGES: "messages"}


def choose_prompt_mapping(
    header: Header, data: DataParameters, *, task: str, tuned_on: str | None = None, group: str = "data"
) -> ColumnMapping:
    """Decide which columns hold the prompt, as they are found for training rows; answers in the file are left out.

    Args:
        header: the columns of the file.
        data: ``format``, ``columns`` and ``template`` that the training rows were read by, or those of the prompts.
        task: ``causal_lm`` or ``seq2seq_lm``.
        tuned_on: format of the rows that the model was tuned on; ``None`` where nobody knows.
        group: group of parameters that ``columns`` and ``template`` are from, for messages.

    Returns:
        A mapping of the format ``text``, ``prompt_response`` or ``messages``, without a column for the answer.

    Raises:
        UserError: columns that are not there, names that fit no format or several, or a format that the model cannot
            be asked in.
    """
    given = data.columns.model_dump(exclude_none=True)
    if tuned_on is None and data.format == TEXT:
        tuned_on = TEXT
    if given or data.template is not None:
        mapping = _given_mapping(given, data, header, group=group)
    else:
        mapping = _conventional_mapping(header, data.format, task=task, tuned_on=tuned_on)
    mapping = _as_tuned(mapping, header, task=task, tuned_on=tuned_on)
    logger.info("Prompts of %s: %s.", header.path, describe_mapping(mapping))
    return mapping


def check_prompt_columns(mapping: ColumnMapping, header: Header, *, group: str = "data") -> None:
    """Refuse a file that lacks a column of the prompts.

    Args:
        mapping: see :func:`choose_prompt_mapping`.
        header: the columns of the file.
        group: see :func:`choose_prompt_mapping`.

    Raises:
        UserError: naming each column, the nearest name and the columns that are there.
    """
    named = [(f"{group}.columns.{part}", column) for part, column in mapping.columns.items()]
    if mapping.template:
        named += [(f"{group}.template", column) for column in template_columns(mapping.template)]
    problems = [header.missing(key, column) for key, column in named if column not in header.columns]
    if problems:
        raise UserError([*problems, _HOW_TO_READ])


def prompt_reader(mapping: ColumnMapping, *, normalize: bool) -> Callable[[Row], Example]:
    """Return a function that turns a row into an example whose answer is :data:`PLACEHOLDER`.

    Args:
        mapping: see :func:`choose_prompt_mapping`.
        normalize: bring text to NFC.

    Returns:
        The function. It raises ``RowProblem`` for a row that cannot be asked.
    """
    if mapping.format == TEXT:
        return example_reader(mapping, normalize=normalize)
    if mapping.format == MESSAGES:
        column, read_messages = mapping.columns["messages"], example_reader(mapping, normalize=normalize)
        return lambda row: read_messages({**row, column: _await_answer(row.get(column), column)})
    answered = replace(mapping, columns={**mapping.columns, "response": _ANSWER_COLUMN})
    read = example_reader(answered, normalize=normalize)
    return lambda row: read({**row, _ANSWER_COLUMN: PLACEHOLDER})


def prompt_of(values: tuple[str | None, ...], format: str) -> Cell:
    """Return the prompt of an example as it was read: a text, or the turns of a conversation.

    Args:
        values: of the example, see ``Example``.
        format: of the mapping.
    """
    if format != MESSAGES:
        return values[0]
    turns: list[Cell] = json.loads(values[0] or "[]")
    return turns[:-1]


def _await_answer(value: Cell, column: str) -> Cell:
    """Return a conversation up to the last turn that is not the assistant's, with a placeholder for its answer."""
    turns = value
    if isinstance(turns, str):
        try:
            turns = json.loads(turns)
        except (ValueError, RecursionError):
            return value  # whoever reads messages says what is wrong
    if not isinstance(turns, list) or not turns:
        return value
    kept = list(turns)
    while kept and _role_of(kept[-1]) == "assistant":
        kept.pop()
    if not kept or _role_of(kept[-1]) == "system":
        raise RowProblem("empty", f"column {column!r} holds no turn to answer: nobody but the assistant speaks in it.")
    return [*kept, {"role": "assistant", "content": PLACEHOLDER}]


def _role_of(turn: Cell) -> str | None:
    name = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    return ROLE_OF_NAME.get(name.strip().lower()) if isinstance(name, str) else None


def _given_mapping(given: dict[str, str], data: DataParameters, header: Header, *, group: str) -> ColumnMapping:
    """Build the mapping from parameters; the part that holds the prompt may bear its own name in the file."""
    format = _format_of(set(given), data.format)
    part, problems = _RENDERED[format], []
    source = "text" if data.format == TEXT_LABEL or "label" in given else part
    column = given.get(source)
    if data.template is not None:
        problems += _find_template_problems(data.template, format, column, group=group)
    elif column is None and part in header.columns:
        column = part
    elif column is None:
        problems.append(
            f"{group}.columns.{source} is to name the column that holds the {part}. Columns that are there: "
            f"{list_columns(header.columns)}.{header.inside()} {_HOW_TO_READ}"
        )
    if problems:
        raise UserError(problems)
    columns = {} if column is None else {part: column}
    columns |= {more: given[more] for more in OPTIONAL_NAMES.get(format, ()) if more in given}
    mapping = ColumnMapping(format, columns, data.template)
    check_prompt_columns(mapping, header, group=group)
    return mapping


def _format_of(parts: set[str], wanted: str) -> str:
    if wanted in (TEXT, MESSAGES) or (wanted == "auto" and "messages" in parts):
        return TEXT if wanted == TEXT else MESSAGES
    is_text = wanted == "auto" and "text" in parts and not parts & {"prompt", "response", "label"}
    return TEXT if is_text else PROMPT_RESPONSE


def _find_template_problems(template: str, format: str, column: str | None, *, group: str) -> list[str]:
    problems = []
    try:
        template_columns(template)
    except ValueError as error:
        problems.append(f"{group}.template: {error}")
    if format == MESSAGES:
        problems.append(f"{group}.template cannot be used with the format 'messages'; set it to null.")
    elif column is not None:
        problems.append(f"{group}.template and {group}.columns both say what the prompt is. Set one of them to null.")
    return problems


def _conventional_mapping(header: Header, format: str, *, task: str, tuned_on: str | None) -> ColumnMapping:
    """Find the one reading whose usual columns are there; one that has an answer as well comes first."""
    by_name = {column.strip().lower(): column for column in header.columns}
    asked = {format} if format in (MESSAGES, TEXT_LABEL) else {PROMPT_RESPONSE}
    if format == "auto" and task != SEQ2SEQ_LM:
        asked.add(MESSAGES)
    known = [one for one in CONVENTIONS if one.format in asked]
    full = [one for one in known if by_name.keys() >= set(one.used_columns)]
    found = _longest_of([_without_answer(one) for one in full])
    if not found:
        waiting = [_without_answer(one) for one in known]
        found = _longest_of([one for one in waiting if by_name.keys() >= set(one.used_columns)])
    # Text alone is running text, as it is in training, unless the model is known to be tuned on something else.
    is_text_alone = not full and tuned_on is None and all(one.used_columns == ["text"] for one in found)
    if "text" in by_name and task != SEQ2SEQ_LM and (tuned_on == TEXT or is_text_alone):
        found = [ColumnMapping(TEXT, {"text": "text"})]
    has = f"{header.path} has the columns {list_columns(header.columns)}"
    if not found:
        raise UserError(f"{has}; no usual name of a prompt is among them.{header.inside()} {_HOW_TO_READ}")
    if len(found) > 1:
        listed = " or ".join(" with ".join(map(repr, one.used_columns)) for one in found)
        raise UserError(f"{has}, of which the prompt may be {listed}. {_HOW_TO_READ}")
    (one,) = found
    optional = {part: by_name[part] for part in OPTIONAL_NAMES.get(one.format, ()) if part in by_name}
    return replace(
        one,
        columns={part: by_name[name] for part, name in one.columns.items()} | optional,
        appended=by_name[one.appended] if one.appended else None,
        read_off=header.path,
    )


def _without_answer(mapping: ColumnMapping) -> ColumnMapping:
    """Leave out the column that answers; a text whose answer is a class is a prompt."""
    if mapping.format == TEXT_LABEL:
        return replace(mapping, format=PROMPT_RESPONSE, columns={"prompt": mapping.columns["text"]})
    return replace(mapping, columns={part: name for part, name in mapping.columns.items() if part != "response"})


def _longest_of(found: list[ColumnMapping]) -> list[ColumnMapping]:
    """Leave out readings that use fewer columns than another one, and all but the first of those that use the same."""
    by_columns = {frozenset(one.used_columns): one for one in reversed(found)}
    return [one for used, one in reversed(by_columns.items()) if not any(used < other for other in by_columns)]


def _as_tuned(mapping: ColumnMapping, header: Header, *, task: str, tuned_on: str | None) -> ColumnMapping:
    """Bring the prompts to the format that the model was tuned on."""
    if task == SEQ2SEQ_LM and mapping.format != PROMPT_RESPONSE:
        if mapping.format == MESSAGES:
            raise UserError(f"{header.path} holds conversations, and an encoder-decoder reads one text. {_HOW_TO_READ}")
        return replace(
            mapping, format=PROMPT_RESPONSE, columns={"prompt": mapping.columns["text"]} if mapping.columns else {}
        )
    if tuned_on != TEXT or mapping.format == TEXT:
        return mapping
    if mapping.format == MESSAGES:
        raise UserError(
            f"{header.path} holds conversations, and the model was tuned on running text, which it goes on with: give "
            "it prompts of text."
        )
    # What was tuned on running text knows no turns: the prompt is the beginning of a text.
    columns = {"text": mapping.columns["prompt"]} if "prompt" in mapping.columns else {}
    return replace(mapping, format=TEXT, columns=columns)


_HOW_TO_READ = (
    "generate.columns and generate.template say how the prompts are read where data.columns and data.template do not "
    "fit them, such as generate.columns.prompt: question."
)
