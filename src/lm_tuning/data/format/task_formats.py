"""Know which formats of rows a task can learn from."""

from __future__ import annotations

from collections.abc import Mapping

from lm_tuning.data.format.conventions import MESSAGES, PROMPT_RESPONSE, TEXT, TEXT_LABEL

CAUSAL_LM, SEQUENCE_CLASSIFICATION, SEQ2SEQ_LM = "causal_lm", "sequence_classification", "seq2seq_lm"

TASK_FORMATS: Mapping[str, tuple[str, ...]] = {
    CAUSAL_LM: (TEXT, PROMPT_RESPONSE, MESSAGES, TEXT_LABEL),
    SEQUENCE_CLASSIFICATION: (TEXT_LABEL,),
    SEQ2SEQ_LM: (PROMPT_RESPONSE,),
}
"""Formats by the ``task`` parameter."""

_NEEDED = {
    SEQUENCE_CLASSIFICATION: "learns the class of a text, so rows need a text and a label: name their columns in "
    "data.columns.text (or write a data.template) and data.columns.label, with data.format: text_label",
    SEQ2SEQ_LM: "learns to turn one text into another, so rows need a prompt and a response: name their columns in "
    "data.columns.prompt (or write a data.template) and data.columns.response, with data.format: prompt_response",
}


def find_format_problem(format: str, *, task: str, path: str) -> str | None:
    """Say why a task can do nothing with rows of a format, or return None.

    Args:
        format: see ``FORMATS``.
        task: the ``task`` parameter.
        path: the file or folder that the rows are in, as messages name it.
    """
    if format in TASK_FORMATS[task]:
        return None
    kind = "conversations" if format == MESSAGES else "rows"
    return f"{path} is read as {kind} of the format {format!r}, but task: {task} {_NEEDED[task]}."
