"""Numbers that YAML reads as others than were written: ``010`` is 8, ``0x10`` is 16 and ``1:30`` is 90."""

from __future__ import annotations

import re
from collections.abc import Iterator

import yaml

from lm_tuning.parameters.schema import accepts, find_entry
from lm_tuning.parameters.sources import Sources

_OTHER_BASES = re.compile(r"[-+]?0(?:[0-7_]+|b[01_]+|x[0-9a-fA-F_]+)|[-+]?\d[\d_]*(?::[0-5]?\d)+(?:\.[\d_]*)?")


def is_other_base(text: str) -> bool:
    """Return whether YAML takes a text for a number with another base than ten, and so for another number.

    Args:
        text: a value as it was typed, without quotes.
    """
    plain = text.strip()
    if _OTHER_BASES.fullmatch(plain) is None:
        return False
    digits = plain.replace("_", "")
    return not digits.lstrip("+-").isdigit() or int(digits) != yaml.safe_load(plain)


def describe_numeral(text: str) -> str:
    """Describe what YAML makes of such a number and how to write what was meant.

    Args:
        text: see :func:`is_other_base`.
    """
    read = yaml.safe_load(text)
    sign = "-" if text.startswith("-") else ""
    plain = text.lstrip("+-0").replace("_", "")
    if plain.isdigit():
        return f"YAML reads {text} as {read}, since a leading 0 means base 8. Write {sign}{plain} or {read}."
    return f"YAML reads {text} as {read}. Write {read}, or what you mean, in base ten."


def find_numerals(sources: Sources) -> list[str]:
    """List the parameters in files whose number YAML reads with another base than ten.

    Args:
        sources: the files in use.

    Returns:
        A sentence for each, with file and line. Where a key wants text, the check of types tells it.
    """
    problems = []
    for file in sources.files():
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        for path, node in _scalars(root, ()):
            if node.style is None and is_other_base(node.value) and _wants_number(path, node.value):
                name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
                where = f"[{sources.show(file)}, line {node.start_mark.line + 1}]"
                problems.append(f"{name.removeprefix('.')} = {node.value}: {describe_numeral(node.value)} {where}")
    return problems


def _wants_number(path: tuple[str | int, ...], text: str) -> bool:
    entry = find_entry(path)
    if entry is None:
        return False
    return not entry or not accepts(entry, text)


def _scalars(
    node: yaml.Node | None, path: tuple[str | int, ...]
) -> Iterator[tuple[tuple[str | int, ...], yaml.ScalarNode]]:
    if isinstance(node, yaml.ScalarNode):
        yield path, node
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _scalars(item, (*path, index))
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _scalars(value, (*path, str(key.value)))
