"""The text behind ``--params``, read with the declared types in mind."""

from __future__ import annotations

from typing import Any

from lm_tuning.parameters.numerals import describe_numeral, is_other_base
from lm_tuning.parameters.schema import accepts, find_entry
from lm_tuning.secrets import is_secret_name, remember

_CLOSING = {"[": "]", "{": "}"}


def parse_parameters(text: str) -> dict[str, Any]:
    r"""Read ``group.key=value,group.key=value`` into nested groups.

    Values are YAML, except that a key that wants text keeps what was typed where YAML would make something else of it:
    ``model.revision=01`` is ``"01"``, and ``data.columns.label=no`` is ``"no"``. Commas inside brackets, braces or
    quotes do not end a value: ``train.lora.target_modules=[q_proj,v_proj]``.

    Raises:
        ValueError: when a part has no ``=`` or no key, or a value is not YAML.
    """
    from omegaconf import OmegaConf
    from yaml import YAMLError

    parsed = OmegaConf.create()
    for item in split_items(text):
        key, equals, value = item.partition("=")
        key = key.strip()
        if find_entry(key.split(".")) is None and is_secret_name(key.rpartition(".")[2]):
            remember([value.strip(), value.strip().strip("'\"")])  # a mistyped key; the error log holds its value
        if not equals or not key:
            raise ValueError(
                f"{item!r} is not of the form key=value; a list needs brackets, and text with commas needs quotes "
                "inside the shell's: --params 'a.b=[x,y],c.d=\"one, two\"'"
            )
        try:
            read = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))
        except YAMLError as error:
            raise ValueError(f"{item!r} cannot be read as YAML; put the value in quotes") from error
        assert isinstance(read, dict)
        kept = _keep_text(key, value.strip(), read["value"])
        if not isinstance(kept, str) and is_other_base(value):
            raise ValueError(f"{item}: {describe_numeral(value.strip())}")
        OmegaConf.update(parsed, key, kept, force_add=True)
    return dict(OmegaConf.to_container(parsed))  # type: ignore[arg-type]


def _keep_text(key: str, typed: str, read: Any) -> Any:
    """Return what was typed where the key wants text and YAML read something else."""
    entry = find_entry(key.split("."))
    if not entry or isinstance(read, (str, dict, list)) or accepts(entry, read) or not accepts(entry, typed):
        return read
    return typed


def split_items(text: str) -> list[str]:
    """Split at commas outside brackets, braces and quotes; a quote counts only where a value or an item starts."""
    items: list[str] = []
    expected: list[str] = []
    start, quote = 0, ""
    opens_value = False
    for position, letter in enumerate(text):
        if quote:
            if letter == quote and (quote == "'" or text[position - 1] != "\\"):
                quote = ""
            continue
        if letter in "'\"" and opens_value:
            quote = letter
        elif letter in _CLOSING and (opens_value or expected):
            expected.append(_CLOSING[letter])
        elif expected and letter == expected[-1]:
            expected.pop()
        elif letter == "," and not expected:
            items.append(text[start:position].strip())
            start = position + 1
        if not letter.isspace():
            opens_value = letter in "=[{:," and (letter == "=" or bool(expected))
    items.append(text[start:].strip())
    return [item for item in items if item]
