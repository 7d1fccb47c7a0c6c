"""What all parameter groups share: strictness, a few value types, and how messages write keys, values and choices."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from lm_tuning.secrets import mask

# Plain YAML 1.1 loaders leave 1e-4 as text, since they want 1.0e-4; the meaning is not in doubt.
_SCIENTIFIC = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


class ParameterGroup(BaseModel):
    """One group of parameters: unknown keys are errors, types are kept, nothing changes after validation.

    The line under each field says what it means and in which unit; it becomes the description in the JSON schema and in
    the reference page.
    """

    # strict: YAML knows numbers from text, so 3 for "3" or 1 for true is a mistake that should be seen. pydantic's own
    # messages hide the input, since ours write it, with secrets masked.
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, hide_input_in_errors=True
    )


def read_scientific(value: object) -> object:
    """Turn text such as ``1e-4`` into the number; leave every other value to the type check."""
    if isinstance(value, str) and _SCIENTIFIC.fullmatch(value.strip()):
        return float(value)
    return value


def _use_slashes(path: str) -> str:
    r"""Read ``data\01_raw\train.jsonl`` as the same file as ``data/01_raw/train.jsonl``."""
    return path.replace("\\", "/")


# The constraint stands before the reader: the other way round it would not reach the JSON schema.
PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(read_scientific)]
NonNegativeNumber = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(read_scientific)]
Fraction = Annotated[float, Field(ge=0, lt=1), BeforeValidator(read_scientific)]
FractionOrAll = Annotated[float, Field(ge=0, le=1), BeforeValidator(read_scientific)]
ScheduleValue = Annotated[Any, BeforeValidator(read_scientific)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
AutoOrCount = Literal["auto"] | Count
Text = Annotated[str, Field(min_length=1)]
PathText = Annotated[str, Field(min_length=1), AfterValidator(_use_slashes)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
TaskName = Literal["causal_lm", "sequence_classification", "seq2seq_lm"]
TASK_FORMATS: Mapping[str, tuple[str, ...]] = {
    "causal_lm": ("text", "prompt_response", "messages", "text_label"),
    "sequence_classification": ("text_label",),
    "seq2seq_lm": ("prompt_response",),
}
"""Values of ``data.format`` that a task learns from."""


KeyPath = tuple[str | int, ...]

_MAX_CHARACTERS = 80


def write_path(path: Sequence[str | int]) -> str:
    """Write a path as people type it, such as ``train.lora.target_modules[1]``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def write_value(value: object) -> str:
    """Write a value as it would stand in YAML, shortened where it is long."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = mask(repr(value))  # before it is cut: half of an address does not show that it holds a password
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + "..."


def join_words(words: Sequence[str], always_comma: bool = False) -> str:
    """Join alternatives as ``a, b or c``; ``always_comma`` keeps phrases that hold an ``or`` of their own apart."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])}{',' if always_comma else ''} or {words[-1]}"
