"""Column names that mean only one thing, so that usual data sets need no parameters, and the tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from lm_tuning.parameters.base import TASK_FORMATS

TEXT, PROMPT_RESPONSE, MESSAGES, TEXT_LABEL = "text", "prompt_response", "messages", "text_label"


@dataclass(frozen=True)
class Convention:
    """Columns of usual names that make a format.

    Attributes:
        format: which.
        columns: column by part.
        appended: column whose text, where a row has any, goes behind the prompt after an empty line.
    """

    format: str
    columns: Mapping[str, str]
    appended: str | None = None

    @property
    def names(self) -> frozenset[str]:
        """Name the columns that must be there."""
        return frozenset([*self.columns.values(), *([self.appended] if self.appended else [])])

    def describe(self) -> str:
        """Describe what is read as what."""
        said = [f"{column!r} as the {part}" for part, column in self.columns.items()]
        if self.appended:
            said.insert(1, f"{self.appended!r} behind it")
        return ", ".join(said)


def _pair(prompt: str, response: str, appended: str | None = None) -> Convention:
    return Convention(PROMPT_RESPONSE, {"prompt": prompt, "response": response}, appended)


CONVENTIONS: Sequence[Convention] = (
    *(
        Convention(MESSAGES, {"messages": name})
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
        Convention(TEXT_LABEL, {"text": text, "label": label})
        for text, label in product(("text", "sentence"), ("label", "labels", "category", "intent"))
    ),
    Convention(TEXT, {"text": "text"}),
)

OPTIONAL_NAMES: Mapping[str, tuple[str, ...]] = {PROMPT_RESPONSE: ("system",), MESSAGES: ("system", "tools")}
"""Parts that are read as well when a column bears their name, by format."""

CONTENT_NAMES = frozenset({"context", "passage", "background", "system", "instruction", "input", "tools"})
"""Names of columns that a model probably should see: a warning says so when they are not used."""


def find_conventions(available: Sequence[str], *, format: str, task: str) -> list[Convention]:
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
    fitting = [one for one in CONVENTIONS if one.format in asked and one.names <= by_name.keys()]
    # A strict subset loses: instruction, input and output says more than input and output.
    best = [one for one in fitting if not any(one.names < other.names for other in fitting)]
    best = [one for one in best if one.format != TEXT] or best
    best = [one for one in best if one.format in TASK_FORMATS[task]] or best
    return [
        Convention(
            convention.format,
            {part: by_name[name] for part, name in convention.columns.items()},
            by_name[convention.appended] if convention.appended else None,
        )
        for convention in best
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
