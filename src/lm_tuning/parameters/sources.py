"""Where a parameter was written: the file, the line, and the text before YAML made a value of it."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
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
        value: object = self.runtime
        for part in path:
            if not isinstance(value, Mapping) or part not in value:
                break
            value = value[part]
        else:
            return Source("--params")
        for folder in self.folders:
            for pattern in ("parameters*", "parameters*/**", "**/parameters*"):
                for name in sorted(glob.glob(str(folder / pattern), recursive=True)):
                    found = self._find_in_file(Path(name), path)
                    if found:
                        return found
        return None

    def _find_in_file(self, file: Path, path: Sequence[str | int]) -> Source | None:
        if file.suffix not in {".yml", ".yaml", ".json"} or not file.is_file():
            return None
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
        shown = file.relative_to(self.root) if file.is_relative_to(self.root) else file
        place = f"{shown}, line {line + 1}"
        if not isinstance(node, yaml.ScalarNode) or node.style is not None:
            return Source(place)
        return Source(f"{place}: {node.value}") if "${" in node.value else Source(place, node.value)
