"""What columns can mean: templates, usual names that need no parameters, and what each task learns from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from string import Formatter

from lm_tuning.parameters.base import TASK_FORMATS

TEXT, PROMPT_RESPONSE, MESSAGES, TEXT_LABEL = "text", "prompt_response", "messages", "text_label"


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

OPTIONAL_NAMES: Mapping[str, tuple[str, ...]] = {PROMPT_RESPONSE: ("system",), MESSAGES: ("system", "tools")}
"""Parts that are read as well when a column bears their name, by format."""

CONTENT_NAMES = frozenset({"context", "passage", "background", "system", "instruction", "input", "tools"})
"""Names of columns that a model probably should see: a warning says so when they are not used."""


def find_conventions(available: Sequence[str], *, format: str, task: str) -> list[ColumnMapping]:
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
    has_classes = task == "sequence_classification"
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


CAUSAL_LM, SEQUENCE_CLASSIFICATION, SEQ2SEQ_LM = "causal_lm", "sequence_classification", "seq2seq_lm"

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
