"""Decide which columns of a file hold the text and, where it has any, the class."""

from __future__ import annotations

from dataclasses import dataclass

from lm_tuning.data.check.findings import list_columns
from lm_tuning.data.format.columns import CONVENTIONS, TEXT, TEXT_LABEL, ColumnMapping, Header, template_columns
from lm_tuning.errors import UserError
from lm_tuning.parameters.data import DataParameters
from lm_tuning.parameters.predict import PredictParameters

_HOW_TO_READ = (
    "predict.columns and predict.template say how these rows are read where data.columns and data.template do not fit "
    "them, such as predict.columns.text: question."
)


@dataclass(frozen=True)
class RowReading:
    """How rows are read.

    Attributes:
        mapping: of the text, in the format ``text``.
        label: column with the class; ``None`` where the file has none.
    """

    mapping: ColumnMapping
    label: str | None

    @property
    def columns(self) -> list[str]:
        """Name every column that is read, each once."""
        return list(dict.fromkeys([*self.mapping.used_columns, *([self.label] if self.label else [])]))

    def describe(self) -> str:
        """Describe it in a few words."""
        template = self.mapping.template
        source = f"text by the template {template!r}" if template else f"text from {self.mapping.columns['text']!r}"
        return f"{source}, label from {self.label!r}" if self.label else f"{source}, no label"


def choose_reading(header: Header, data: DataParameters, predict: PredictParameters) -> RowReading:
    """Find the text by parameters, those of ``predict`` first, or by the column names that training rows are found by.

    Args:
        header: the columns of the file.
        data: the ``data`` parameters that the training rows were read by.
        predict: the ``predict`` parameters.

    Raises:
        UserError: columns that are not there, names that fit nothing or too much, or a template that does not parse.
    """
    own = predict.columns.text is not None or predict.template is not None
    group = "predict" if own else "data"
    given = (predict.columns, predict) if own else (data.columns, data)
    text, template = given[0].text, given[1].template
    problems = _find_problems(header, group, text, template)
    label = predict.columns.label
    if label is not None and label not in header.columns:
        problems.append(header.missing("predict.columns.label", label))
    if problems:
        raise UserError([*problems, _HOW_TO_READ])
    if label is None:
        label = _find_label(header, data.columns.label)
    if template is not None:
        return RowReading(ColumnMapping(TEXT, {}, template), label)
    return RowReading(ColumnMapping(TEXT, {"text": text or _find_text(header, label)}), label)


def check_reading(reading: RowReading, header: Header) -> None:
    """Refuse a further file that lacks a column of the first one.

    Args:
        reading: of the first file.
        header: the columns of the other.

    Raises:
        UserError: naming each column and those that are there.
    """
    problems = [header.missing("predict.path", column) for column in reading.columns if column not in header.columns]
    if problems:
        raise UserError([*problems, "All files are read as the first one is."])


def _find_problems(header: Header, group: str, text: str | None, template: str | None) -> list[str]:
    if text is not None and template is not None:
        return [f"{group}.template and {group}.columns both say what the text is. Set one of them to null."]
    if text is not None:
        return [] if text in header.columns else [header.missing(f"{group}.columns.text", text)]
    if template is None:
        return []
    try:
        named = template_columns(template)
    except ValueError as error:
        return [f"{group}.template: {error}"]
    return [header.missing(f"{group}.template", column) for column in named if column not in header.columns]


def _find_label(header: Header, learned: str | None) -> str | None:
    """Return the column with the class: that of the training rows, or a usual name; it may well not be there."""
    if learned is not None:
        return learned if learned in header.columns else None
    by_name = {column.strip().lower(): column for column in header.columns}
    usual = dict.fromkeys(one.columns["label"] for one in CONVENTIONS if one.format == TEXT_LABEL)
    found = [by_name[name] for name in usual if name in by_name]
    # Of several nobody knows which is meant, and nothing depends on it but a figure.
    return found[0] if len(found) == 1 else None


def _find_text(header: Header, label: str | None) -> str:
    """Return the column with the text, by a usual name, or the only one that there is beside the label."""
    by_name = {column.strip().lower(): column for column in header.columns}
    usual = dict.fromkeys(one.columns["text"] for one in CONVENTIONS if one.format == TEXT_LABEL)
    found = [by_name[name] for name in usual if name in by_name]
    others = [column for column in header.columns if column != label]
    if not found and len(others) == 1:
        found = others
    if len(found) == 1:
        return found[0]
    has = f"{header.path} has the columns {list_columns(header.columns)}"
    which = ", of which the text may be " + " or ".join(map(repr, found)) if found else "; none is usual for a text"
    raise UserError([f"{has}{which}.{header.inside()}", _HOW_TO_READ])
