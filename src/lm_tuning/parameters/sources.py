"""Where a parameter was written: the file, the line, and the text before YAML made a value of it."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Source:
    """One place where a parameter was written.

    Attributes:
        place: ``conf/base/parameters.yml, line 12`` or ``--params``.
        text: the value as it stands there without quotes; None for groups, lists and quoted text.
    """

    place: str
    text: str | None = None


@dataclass(frozen=True)
class Sources:
    """The places parameters come from, the strongest first.

    Attributes:
        runtime: what ``--params`` gave, already parsed.
        folders: configuration folders, the environment's before the base.
        root: folder that places are told from.
    """

    runtime: Mapping[str, object]
    folders: tuple[Path, ...]
    root: Path

    def find(self, path: Sequence[str | int]) -> Source | None:
        """Return the strongest place where a key is written, or None when it is a default."""
        if _holds(self.runtime, path):
            return Source("--params")
        return next((found for folder in self.folders if (found := self._find_in_folder(folder, path))), None)

    def layer(self, path: Sequence[str | int]) -> int:
        """Return how near the strongest place of a key is: 0 for ``--params``, then each folder, then defaults."""
        if _holds(self.runtime, path):
            return 0
        places = (number for number, folder in enumerate(self.folders, 1) if self._find_in_folder(folder, path))
        return next(places, len(self.folders) + 1)

    def files(self) -> Iterator[Path]:
        """Yield every file that parameters are read from, the strongest folder's first."""
        for folder in self.folders:
            yield from _files_in(folder)

    def show(self, file: Path) -> str:
        """Write a file as messages name it."""
        return str(file.relative_to(self.root) if file.is_relative_to(self.root) else file)

    def _find_in_folder(self, folder: Path, path: Sequence[str | int]) -> Source | None:
        return next((found for file in _files_in(folder) if (found := self._find_in_file(file, path))), None)

    def _find_in_file(self, file: Path, path: Sequence[str | int]) -> Source | None:
        node = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
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
        place = f"{self.show(file)}, line {line + 1}"
        if not isinstance(node, yaml.ScalarNode) or node.style is not None:
            return Source(place)
        return Source(f"{place}: {node.value}") if "${" in node.value else Source(place, node.value)


def _holds(values: object, path: Sequence[str | int]) -> bool:
    for part in path:
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return True


def _files_in(folder: Path) -> Iterator[Path]:
    """Yield the files of a configuration folder that Kedro takes parameters from, each once."""
    patterns = ("parameters*", "parameters*/**", "**/parameters*")
    names = (name for pattern in patterns for name in sorted(glob.glob(str(folder / pattern), recursive=True)))
    for file in map(Path, dict.fromkeys(names)):
        if file.suffix in {".yml", ".yaml", ".json"} and file.is_file():
            yield file
