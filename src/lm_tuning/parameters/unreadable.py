"""Name the configuration file that is no YAML, and the place in it: the loader's own message lacks one or both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

_SUFFIXES = frozenset({".yml", ".yaml", ".json"})


def describe_unreadable(error: Exception, folders: Iterable[Path], root: Path) -> list[str]:
    """Say in one sentence a file where it cannot be read and why.

    Args:
        error: what reading one of the files raised: an error of YAML, or of decoding.
        folders: configuration folders to look for the file in.
        root: folder that paths are told from.

    Returns:
        A sentence for each file that fails in the same way; none where no file does.
    """
    cause = error.__cause__ if isinstance(error.__cause__, yaml.YAMLError | UnicodeDecodeError) else error
    sentences = []
    for file in _files(folders):
        found = _read_error(file)
        if found is not None and _key(found) == _key(cause):
            shown = file.relative_to(root) if file.is_relative_to(root) else file
            sentences.append(f"{shown}{_place(found, file)} cannot be read as YAML: {_reason(found, file)}")
    return sentences


def _files(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in dict.fromkeys(folders):
        yield from sorted(file for file in folder.rglob("*") if file.suffix in _SUFFIXES and file.is_file())


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
