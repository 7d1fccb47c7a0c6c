"""Configuration files: where a parameter was written, and what nobody reads, or YAML reads as something else.

Of a parameter the file, the line and the text are found before YAML made a value of it: ``010`` is 8, ``0x10`` is 16
and ``1:30`` is 90. Of what nobody reads, a mistyped ``output`` in an overlay's ``globals.yml`` is the worst: results go
over another run's.
"""

from __future__ import annotations

import fnmatch
import glob
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path

import yaml

from lm_tuning.json_types import JsonObject
from lm_tuning.parameters.base import KeyPath, write_path
from lm_tuning.parameters.schema import accepts, find_entry

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


def find_numerals(sources: Sources) -> Iterator[str]:
    """Find the parameters in files whose number YAML reads with another base than ten.

    Args:
        sources: the files in use.

    Yields:
        A sentence for each, with file and line. Where a key wants text, the check of types tells it.
    """
    for file in sources.files():
        root = _compose(file.read_text(encoding="utf-8"))
        for path, node in _scalars(root, ()):
            if node.style is None and is_other_base(node.value) and _wants_number(path, node.value):
                where = f"[{show_path(file, sources.root)}, line {node.start_mark.line + 1}]"
                yield f"{write_path(path)} = {node.value}: {describe_numeral(node.value)} {where}"


def _wants_number(path: KeyPath, text: str) -> bool:
    entry = find_entry(path)
    return entry is not None and (not entry or not accepts(entry, text))


def _scalars(node: yaml.Node | None, path: KeyPath) -> Iterator[tuple[KeyPath, yaml.ScalarNode]]:
    if isinstance(node, yaml.ScalarNode):
        yield path, node
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _scalars(item, (*path, index))
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _scalars(value, (*path, str(key.value)))


_NOTES = {".md", ".rst", ".bak", ".orig", ".old", ".swp", ".example", ".sample", ".template"}
# What Kedro looks for, beside the patterns that the project's settings add.
_KNOWN_FILES = ("globals.yml", "parameters.yml", "catalog.yml", "mlflow.yml", "credentials.yml")
_CLOSE_ENOUGH = 0.75
_REFERENCE = re.compile(r"\$\{globals:\s*([A-Za-z_][\w.]*)")


def find_unread_files(
    sources: Sources, conf: Path, patterns: Mapping[str, Iterable[str]]
) -> tuple[list[str], list[str]]:
    """List files of the environments in use that no pattern of Kedro's loader matches.

    Args:
        sources: the environments' folders in use.
        conf: the configuration folder, which holds a folder for each environment.
        patterns: glob patterns by kind of configuration, relative to a folder.

    Returns:
        A problem for each file whose name comes near one that is read, and a warning for each other YAML file. Hidden
        files, notes, keys in JSON and copies of an editor are let be.
    """
    root, every = sources.root, [pattern for kind in patterns.values() for pattern in kind]
    problems, warnings = [], []
    for file in sorted(item for item in conf.glob("*") if item.suffix in CONFIG_SUFFIXES and item.is_file()):
        if file.name != "logging.yml" and (nearest := _nearest_file(file.name)):
            problems.append(
                f"{show_path(file, root)} is read by nothing: move it into the folder of an environment, such "
                f"as {show_path(conf, root)}/base/{nearest}."
            )
    # Every file below, since the loader's patterns go into folders as well.
    for folder in sources.folders:
        for file in sorted(item for item in folder.rglob("*") if item.is_file()):
            name = file.relative_to(folder).as_posix()
            is_yaml = file.suffix in CONFIG_SUFFIXES
            if file.name.startswith(".") or file.name.endswith("~") or file.suffix.lower() in _NOTES:
                continue
            if is_yaml and any(_matches(name, pattern) for pattern in every):
                continue
            nearest = _nearest_file(file.name)
            told = f"{show_path(file, root)} is read by nothing, so what it sets is left out."
            if nearest == "logging.yml":
                problems.append(
                    f"{told} Kedro reads {show_path(conf, root)}/logging.yml, or what KEDRO_LOGGING_CONFIG names."
                )
            elif nearest and (nearest != file.name or "/" in name):
                problems.append(f"{told} Did you mean {nearest}?")
            elif file.suffix in {".yml", ".yaml"}:  # whoever keeps the keys of a cloud there as JSON knows it
                warnings.append(f"{told} Files that are read: {', '.join(_KNOWN_FILES)}.")
    return problems, warnings


def find_unread_globals(sources: Sources, values: JsonObject) -> Iterator[str]:
    """Find keys of ``globals.yml`` that no configuration file in use refers to.

    Args:
        sources: the files in use.
        values: the merged globals.

    Yields:
        A sentence for each, with the nearest key that is referred to.
    """
    texts = {file: file.read_text(encoding="utf-8", errors="replace") for file in _config_files(sources.folders)}
    # By the text of the files, since OmegaConf does not tell which references it has resolved.
    used = {name.partition(".")[0] for text in texts.values() for name in _REFERENCE.findall(text)}
    for key in values:
        if key in used or str(key).startswith("_"):
            continue
        # At the start of a line: a nested key of the same name is another one.
        written = re.compile(rf"(?m)^{re.escape(str(key))}\s*:")
        file = next((file for file in texts if file.name == "globals.yml" and written.search(texts[file])), None)
        where = f" [{show_path(file, sources.root)}]" if file else ""
        nearest = get_close_matches(str(key), sorted(used), n=1, cutoff=_CLOSE_ENOUGH)
        hint = f"Did you mean {nearest[0]}?" if nearest else f"Keys that are: {', '.join(sorted(used))}."
        yield (
            f"globals.yml sets {key}, which no configuration file refers to (as ${{globals:{key}}}), so it would be "
            f"left out. {hint}{where}"
        )


def _nearest_file(name: str) -> str | None:
    """Return the file that was meant by a name, ``None`` when none comes near."""
    stem = name.partition(".")[0].lower()
    head, joint, rest = stem.partition("_")
    stems = {known.partition(".")[0]: known for known in (*_KNOWN_FILES, "logging.yml")}
    # parameter_train.yml is near no known name as a whole; its head is.
    for part, ending in ((stem, ""), (head, f"{joint}{rest}")):
        near = get_close_matches(part, stems, n=1, cutoff=_CLOSE_ENOUGH)
        if near:
            meant = stems[near[0]]
            return meant.replace(".yml", f"{ending}.yml") if ending and near[0] not in {"globals", "logging"} else meant
    return None


def _matches(name: str, pattern: str) -> bool:
    """Match as the loader's recursive glob does: ``**/`` also stands for nothing."""
    return fnmatch.fnmatch(name, pattern) or (pattern.startswith("**/") and fnmatch.fnmatch(name, pattern[3:]))


def describe_unreadable(error: Exception, folders: Iterable[Path], root: Path) -> list[str]:
    """Describe in one sentence a file where it cannot be read and why.

    Args:
        error: what reading one of the files raised: an error of YAML, or of decoding.
        folders: configuration folders to look for the file in.
        root: folder that paths are told from.

    Returns:
        A sentence for each file that fails in the same way; none where no file does.
    """
    # The loader wraps the error, and neither says which file it was: each is read again until one fails alike.
    cause = error.__cause__ if isinstance(error.__cause__, yaml.YAMLError | UnicodeDecodeError) else error
    sentences = []
    for file in _config_files(folders):
        found = _read_error(file)
        if found is not None and _key(found) == _key(cause):
            sentences.append(
                f"{show_path(file, root)}{_place(found, file)} cannot be read as YAML: {_reason(found, file)}"
            )
    return sentences


def _config_files(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in dict.fromkeys(folders):
        yield from sorted(file for file in folder.rglob("*") if file.suffix in CONFIG_SUFFIXES and file.is_file())


def _read_error(file: Path) -> Exception | None:
    """Read a file as the loader does, and return what that raises."""
    from omegaconf import OmegaConf

    try:
        OmegaConf.load(file)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        return error
    except Exception:  # what is wrong beyond the syntax is told elsewhere
        return None
    return None


def _key(error: Exception) -> tuple[object, ...]:
    """Return what two errors about the same text have in common."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark
        return (error.problem, mark and (mark.line, mark.column))
    return (type(error).__name__, str(error).splitlines()[0])


def _place(error: Exception, file: Path) -> str:
    """Write line and column, both from 1, where they are known."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f", line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    if isinstance(error, UnicodeDecodeError):
        # The error counts from the start of what was decoded at once, which need not be that of the file.
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((f", line {number}" for number, line in enumerate(lines, 1) if "\ufffd" in line), "")
    if isinstance(error, yaml.reader.ReaderError):
        # One loader counts characters and another bytes, so the character is looked for.
        before = file.read_text(encoding="utf-8").partition(chr(error.character))[0]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        return f", line {line}, column {column}"
    return ""


def _reason(error: Exception, file: Path) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8. Save it as UTF-8."
    if isinstance(error, yaml.reader.ReaderError):
        return f"the character U+{error.character:04X} is not allowed."
    if not isinstance(error, yaml.MarkedYAMLError) or not error.problem:
        return f"{str(error).splitlines()[0].rstrip('.')}."
    mark = error.problem_mark
    if mark and file.read_text(encoding="utf-8").split("\n")[mark.line][mark.column :].startswith("\t"):
        return "a tab where spaces are wanted. Indent with spaces."
    return f"{error.problem}.{' Keep one of the two.' * ('duplicate key' in error.problem)}"
