"""Where a parameter was written: the file, the line, and the text before YAML made a value of it.

YAML reads some numbers as others than were written: ``010`` is 8, ``0x10`` is 16 and ``1:30`` is 90.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import yaml

from lm_tuning.json_types import JsonObject
from lm_tuning.parameters.schema import accepts, find_entry
from lm_tuning.parameters.written import KeyPath, write_path

CONFIG_SUFFIXES = frozenset({".yml", ".yaml", ".json"})


def show_path(path: Path, root: Path) -> str:
    """Write a file or folder as messages name it: from the project's folder where it lies inside."""
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


@dataclass(frozen=True)
class Source:
    """One location where a parameter was written.

    Attributes:
        location: ``conf/base/parameters.yml, line 12`` or ``--params``.
        text: the value as it stands there without quotes; None for groups, lists and quoted text.
    """

    location: str
    text: str | None = None


@dataclass(frozen=True)
class Sources:
    """The locations that parameters come from, the strongest first.

    Attributes:
        runtime: what ``--params`` gave, already parsed.
        folders: configuration folders, the environment's before the base.
        root: folder that paths in messages are relative to.
    """

    runtime: JsonObject
    folders: tuple[Path, ...]
    root: Path

    def find(self, path: Sequence[str | int]) -> Source | None:
        """Return the strongest location where a key is written, or None when it is a default."""
        if _holds(self.runtime, path):
            return Source("--params")
        # The nearest folder has the last word, as in Kedro's merge.
        return next((found for folder in self.folders if (found := self._find_in_folder(folder, path))), None)

    def layer(self, path: Sequence[str | int]) -> int:
        """Return how near the strongest location of a key is: 0 for ``--params``, then each folder, then defaults."""
        if _holds(self.runtime, path):
            return 0
        locations = (number for number, folder in enumerate(self.folders, 1) if self._find_in_folder(folder, path))
        return next(locations, len(self.folders) + 1)

    def files(self) -> Iterator[Path]:
        """Yield every file that parameters are read from, the strongest folder's first."""
        for folder in self.folders:
            yield from _files_in(folder)

    def _find_in_folder(self, folder: Path, path: Sequence[str | int]) -> Source | None:
        return next((found for file in _files_in(folder) if (found := self._find_in_file(file, path))), None)

    def _find_in_file(self, file: Path, path: Sequence[str | int]) -> Source | None:
        node = _compose(file.read_text(encoding="utf-8"))
        line = 0
        for part in path:
            if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                line = node.start_mark.line
                continue
            if not isinstance(node, yaml.MappingNode):
                return None
            pairs = {key.value: (key, value) for key, value in node.value}
            if part not in pairs:
                return None
            key, node = pairs[part]
            line = key.start_mark.line
        location = f"{show_path(file, self.root)}, line {line + 1}"
        # A style is a quote or a block: what stands inside is text already.
        if not isinstance(node, yaml.ScalarNode) or node.style is not None:
            return Source(location)
        return Source(f"{location}: {node.value}") if "${" in node.value else Source(location, node.value)


# Nodes, not values: only they know line and spelling. Composing is slow, and each key is looked for in every file.
@lru_cache(maxsize=64)
def _compose(text: str) -> yaml.Node | None:
    node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    return node


def _holds(values: object, path: Sequence[str | int]) -> bool:
    for part in path:
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return True


def _files_in(folder: Path) -> Iterator[Path]:
    """Yield the files of a configuration folder that Kedro takes parameters from, each once."""
    # As the default patterns of Kedro's OmegaConfigLoader have it.
    patterns = ("parameters*", "parameters*/**", "**/parameters*")
    names = (name for pattern in patterns for name in sorted(glob.glob(str(folder / pattern), recursive=True)))
    for file in map(Path, dict.fromkeys(names)):
        if file.suffix in CONFIG_SUFFIXES and file.is_file():
            yield file


# YAML 1.1, which Kedro reads: a leading 0 for base 8, 0b, 0x, and colons for base 60.
_OTHER_BASES = re.compile(r"[-+]?0(?:[0-7_]+|b[01_]+|x[0-9a-fA-F_]+)|[-+]?\d[\d_]*(?::[0-5]?\d)+(?:\.[\d_]*)?")


def is_other_base(text: str) -> bool:
    """Return whether YAML takes a text for a number with another base than ten, and so for another number.

    Args:
        text: a value as it was typed, without quotes.
    """
    plain = text.strip()
    if _OTHER_BASES.fullmatch(plain) is None:
        return False
    # 00 and 07 are the same number in both bases, and nobody is misled.
    digits = plain.replace("_", "")
    return not digits.lstrip("+-").isdigit() or int(digits) != yaml.safe_load(plain)


def describe_numeral(text: str) -> str:
    """Describe what YAML makes of such a number and how to write what was meant.

    Args:
        text: see :func:`is_other_base`.
    """
    # Both readings are offered: who wrote 010 may have meant 10 or known what it is.
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
        root = _compose(file.read_text(encoding="utf-8"))
        for path, node in _scalars(root, ()):
            if node.style is None and is_other_base(node.value) and _wants_number(path, node.value):
                where = f"[{show_path(file, sources.root)}, line {node.start_mark.line + 1}]"
                problems.append(f"{write_path(path)} = {node.value}: {describe_numeral(node.value)} {where}")
    return problems


def _wants_number(path: KeyPath, text: str) -> bool:
    entry = find_entry(path)
    if entry is None:
        return False
    return not entry or not accepts(entry, text)


def _scalars(node: yaml.Node | None, path: KeyPath) -> Iterator[tuple[KeyPath, yaml.ScalarNode]]:
    if isinstance(node, yaml.ScalarNode):
        yield path, node
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _scalars(item, (*path, index))
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _scalars(value, (*path, str(key.value)))
