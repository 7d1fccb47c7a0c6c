"""Bring a row to its format: checked, normalized, in a fixed order of fields, with a digest that finds copies."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import NamedTuple

from lm_tuning.data.check.findings import RowProblem, wrong_type
from lm_tuning.data.format.columns import MESSAGES, PROMPT_RESPONSE, TEXT, TEXT_LABEL, ColumnMapping, parse_template
from lm_tuning.data.format.messages import (
    add_system,
    comparable_messages,
    describe_oddities,
    read_messages,
    read_tools,
    write_messages,
)
from lm_tuning.data.format.nested import explain_missing
from lm_tuning.data.records import Cell, Row

FIELDS: Mapping[str, tuple[str, ...]] = {
    TEXT: ("text",),
    PROMPT_RESPONSE: ("prompt", "response", "system"),
    MESSAGES: ("messages", "tools"),
    TEXT_LABEL: ("text", "label"),
}
"""Fields of an example by format, in the order of storage; ``system`` and ``tools`` may be null."""

JSON_FIELDS = frozenset({"messages", "tools"})
"""Fields whose text is JSON."""

_DIGEST_BYTES = 16

# No text that a person wrote holds this.
_SEPARATOR = "\x00\x1f\x00"

Composed = tuple[str, tuple[int, ...]]
"""A text, and start and end of each column in it, in characters, end to end."""

ReadField = Callable[[Row], str]
ReadComposed = Callable[[Row], Composed]


class Example(NamedTuple):
    """One checked row.

    Attributes:
        values: one value per field of the format.
        content_digest: 16 bytes, equal for rows whose content is the same after trimming and NFC, whatever the label.
        whole_digest: the same with the label, so that copies with another label are told apart.
        oddities: kind and reason of what is unusual in it; the row is used all the same.
        column_ranges: start and end of each column in a composed prompt, or text, in characters, end to end.
    """

    values: tuple[str | None, ...]
    content_digest: bytes
    whole_digest: bytes
    oddities: tuple[tuple[str, str], ...] = ()
    column_ranges: tuple[int, ...] = ()


def example_reader(mapping: ColumnMapping, *, normalize: bool) -> Callable[[Row], Example]:
    """Return a function that turns a row into an example.

    Args:
        mapping: what the columns mean.
        normalize: bring text to NFC, which changes no meaning; nothing else is ever changed.

    Returns:
        The function. It raises ``RowProblem`` for a row that cannot be used.
    """
    columns = mapping.columns
    if mapping.format == MESSAGES:
        return _messages_reader(columns, normalize=normalize)
    # Functions are made once for a run and know their columns, so that no row is asked again what its format is.
    readers = {part: text_reader(column, normalize=normalize) for part, column in columns.items() if part != "label"}
    composed = "prompt" if mapping.format == PROMPT_RESPONSE else "text"
    if mapping.template:
        read_composed = _rendered_reader(mapping.template, normalize=normalize)
    elif mapping.appended:
        read_composed = _appending_reader(readers[composed], mapping.appended, normalize=normalize)
    else:
        read_composed = _whole_reader(readers[composed])
    if mapping.format == PROMPT_RESPONSE:
        return _prompt_response_reader(read_composed, readers["response"], columns.get("system"), normalize)
    if mapping.format == TEXT_LABEL:
        return _text_label_reader(read_composed, value_reader(columns["label"], normalize=normalize))

    def read(row: Row) -> Example:
        text, edges = read_composed(row)
        digest = digest_parts(text.strip())
        return Example((text,), digest, digest, column_ranges=edges)

    return read


def text_reader(column: str, *, normalize: bool) -> ReadField:
    """Return a function that takes the text of a column.

    Args:
        column: its name.
        normalize: bring it to NFC.

    Returns:
        The function. It raises ``RowProblem`` for a missing column, another type and blank text.
    """

    def read(row: Row) -> str:
        value = row.get(column)
        if not isinstance(value, str):
            raise _wrong_value(row, column, "text")
        if not value or value.isspace():
            raise RowProblem("empty", f"column {column!r} is empty.")
        # ASCII is in NFC by itself, and asking for it costs nothing.
        return unicodedata.normalize("NFC", value) if normalize and not value.isascii() else value

    return read


def value_reader(column: str, *, normalize: bool) -> ReadField:
    """Return a function that takes a class, group or stratum: text, or an integer or boolean as its text.

    It is a name, so space around it does not count.

    Args:
        column: its name.
        normalize: bring it to NFC.

    Returns:
        The function. It raises ``RowProblem`` for anything else, and for an empty value.
    """

    def read(row: Row) -> str:
        value = row.get(column)
        if isinstance(value, bool):  # before int, whose subclass it is
            return "true" if value else "false"
        if isinstance(value, int):
            return str(value)
        if not isinstance(value, str):
            if value is None and column in row:
                raise RowProblem("missing_value", f"column {column!r} holds null.")
            raise _wrong_value(row, column, "text or an integer")
        if not value or value.isspace():
            raise RowProblem("missing_value", f"column {column!r} is empty.")
        value = value.strip()
        _encoded(value)
        return unicodedata.normalize("NFC", value) if normalize and not value.isascii() else value

    return read


def digest_parts(*parts: str) -> bytes:
    """Return 16 bytes that are equal for equal parts after NFC.

    Args:
        parts: texts; where one ends and the next begins counts.

    Raises:
        RowProblem: a part holds half of a surrogate pair, which no UTF-8 file can hold.
    """
    text = _SEPARATOR.join(parts)
    # Copies are found whatever the form of their accents, also where texts are stored as they came.
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    # 128 bits: among a billion rows two different ones meet with a chance of 1 in 10^21.
    return blake2b(_encoded(text), digest_size=_DIGEST_BYTES).digest()


def _digest_labelled(text: str, label: str) -> tuple[bytes, bytes]:
    """Return the digest of a text and that of text and label, reading the text once."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    state = blake2b(_encoded(text), digest_size=_DIGEST_BYTES)
    # The digest of the text alone; the state then goes on with the label.
    content = state.digest()
    state.update(_encoded(_SEPARATOR + unicodedata.normalize("NFC", label)))
    return content, state.digest()


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RowProblem(
            "lone_surrogate",
            f"holds half of a surrogate pair (\\u{ord(text[error.start]):04x}), which is no character.",
        ) from error


def _prompt_response_reader(
    read_prompt: ReadComposed, read_response: ReadField, system_column: str | None, normalize: bool
) -> Callable[[Row], Example]:
    read_system = _optional_reader(system_column, normalize=normalize)

    def read(row: Row) -> Example:
        prompt, edges = read_prompt(row)
        response = read_response(row)
        system = read_system(row) if read_system else None
        # A missing system prompt and an empty one are the same.
        digest = digest_parts(prompt.strip(), response.strip(), (system or "").strip())
        return Example((prompt, response, system), digest, digest, (), edges)

    return read


def _text_label_reader(read_text: ReadComposed, read_label: ReadField) -> Callable[[Row], Example]:
    def read(row: Row) -> Example:
        text, edges = read_text(row)
        try:
            label = read_label(row)
        except RowProblem as problem:
            raise RowProblem("unlabelled", f"unlabelled: {problem.reason}") from problem
        return Example((text, label), *_digest_labelled(text.strip(), label), (), edges)

    return read


def _messages_reader(columns: Mapping[str, str], *, normalize: bool) -> Callable[[Row], Example]:
    column, tools_column = columns["messages"], columns.get("tools")
    read_system = _optional_reader(columns.get("system"), normalize=normalize)

    def read(row: Row) -> Example:
        if row.get(column) is None:
            raise _wrong_value(row, column, "a list of messages")
        messages = read_messages(row[column], column=column)
        system = read_system(row) if read_system else None
        if system:
            messages = add_system(messages, system)
        text = write_messages(messages, normalize=normalize)
        found = read_tools(row.get(tools_column), column=tools_column) if tools_column else None
        tools = write_messages(found, normalize=normalize) if found else None
        digest = digest_parts(comparable_messages(messages, text), *([tools] if tools else []))
        return Example((text, tools), digest, digest, describe_oddities(messages))

    return read


def _optional_reader(column: str | None, *, normalize: bool) -> Callable[[Row], str | None] | None:
    """Return a function that takes text which rows may lack: null, an empty cell and a missing key mean none."""
    if column is None:
        return None
    read_text = text_reader(column, normalize=normalize)

    def read(row: Row) -> str | None:
        return None if row.get(column) in (None, "") else read_text(row)

    return read


def _whole_reader(read_text: ReadField) -> ReadComposed:
    """Return a function that takes a text which no fixed text is put around."""
    return lambda row: (read_text(row), ())


def _appending_reader(read_prompt: ReadField, column: str, *, normalize: bool) -> ReadComposed:
    """Return a function that puts the text of a second column, where a row has any, behind the prompt."""

    def read(row: Row) -> Composed:
        prompt = read_prompt(row)
        value = row.get(column)
        if value is None or (isinstance(value, str) and not value.strip()):
            return prompt, (0, len(prompt))
        if not isinstance(value, str):
            raise _wrong_value(row, column, "text")
        text = f"{prompt}\n\n{unicodedata.normalize('NFC', value) if normalize else value}"
        return text, (0, len(prompt), len(prompt) + 2, len(text))

    return read


def _rendered_reader(template: str, *, normalize: bool) -> ReadComposed:
    render = _template_renderer(template)
    return (lambda row: _normalize_composed(render(row))) if normalize else render


def _template_renderer(template: str) -> Callable[[Row], Composed]:
    """Return a function from a row to its rendered text and the columns' positions in that.

    Values are inserted as they are, so braces in them are safe. Numbers and booleans are written as JSON writes them; a
    missing value is written as nothing, for columns that only some rows fill.

    Args:
        template: see ``parse_template``.

    Returns:
        The function. It raises ``RowProblem`` when every placeholder is empty or one holds a list or an object.
    """
    parts = parse_template(template)

    def render(row: Row) -> Composed:
        chunks: list[str] = []
        edges: list[int] = []
        length = 0
        is_filled = False
        for literal, column in parts:
            chunks.append(literal)
            length += len(literal)
            if column is None:
                continue
            value = row.get(column)
            text = value if isinstance(value, str) else _written(column, value)
            if text and not text.isspace():
                is_filled = True
            chunks.append(text)
            edges += (length, length + len(text))
            length += len(text)
        if not is_filled:
            raise RowProblem("empty", "every column of the template is empty.")
        return "".join(chunks), tuple(edges)

    return render


def _normalize_composed(composed: Composed) -> Composed:
    """Bring a composed text to NFC, and the columns' positions with it.

    Args:
        composed: text and positions.
    """
    text, edges = composed
    if text.isascii() or unicodedata.is_normalized("NFC", text):
        return composed
    # An accent that joins a letter across an edge moves the edge by one character.
    moved = tuple(len(unicodedata.normalize("NFC", text[:edge])) for edge in edges)
    return unicodedata.normalize("NFC", text), moved


def _written(column: str, value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise wrong_type(f"column {column!r} holds", value, "text or a number")


def _wrong_value(row: Row, column: str, wanted: str) -> RowProblem:
    if column not in row:
        reason = explain_missing(row, column)
        return RowProblem("missing_column", f"has no column {column!r}{f': {reason}' if reason else ''}.")
    return wrong_type(f"column {column!r} holds", row[column], wanted)
