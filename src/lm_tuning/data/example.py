"""Make the example: functions of the Python standard library and the first line of their docstrings."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import sysconfig
import textwrap
import unicodedata
import warnings
from collections.abc import Iterator
from pathlib import Path

from lm_tuning.data.sources.paths import resolve_path
from lm_tuning.errors import UserError
from lm_tuning.parameters.data import SourceParameters
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.storage.atomic import write_text_atomic

EXAMPLE_PATH = "data/01_raw/example/functions.jsonl"
"""Where the example lies, relative to the project; ``data.path`` as it is shipped."""

EXAMPLE_TEMPLATE = "Describe this Python function in one line.\n\n{source}"
EXAMPLE_RESPONSE = "summary"
EXAMPLE_GROUP = "module"

# Tests, generated tables, vendored tools and third-party code: nothing in them describes itself well.
_SKIPPED_FOLDERS = frozenset(
    "__phello__ __pycache__ distutils dist-packages ensurepip idle_test idlelib lib-dynload lib2to3 msilib pydoc_data "
    "site-packages test tests turtledemo".split()
)
_MIN_SUMMARY_WORDS = 3
_MAX_SUMMARY_CHARACTERS = 160
_MIN_SOURCE_CHARACTERS = 40
# Short functions: prompt, answer and chat template fit into 512 tokens, and a step of 512 tokens has several rows.
_MAX_SOURCE_CHARACTERS = 800
_SENTENCE_ENDS = (".", "!", "?")
# A full stop ends the sentence unless it belongs to an abbreviation or the next word goes on in lower case.
_FIRST_SENTENCE = re.compile(r".+?(?<!e\.g)(?<!i\.e)(?<!etc)(?<!vs)[.!?](?=\s+[^a-z]|\s*$)")
_LONG_WORD = re.compile(r"[^\W\d_]{2,}")  # "a ** b." has none and is no sentence
_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def make_example(path: Path, *, on_progress: OnProgress = ignore_progress) -> int:
    """Write the example as JSON Lines with the columns ``source``, ``summary`` and ``module``.

    The rows come in the order of modules and lines, so the same interpreter always writes the same file. The file
    appears whole or not at all.

    Args:
        path: the file to write.
        on_progress: told the files read.

    Returns:
        Number of rows.

    Raises:
        UserError: this interpreter has no sources of its standard library.
    """
    rows = find_functions(Path(sysconfig.get_paths()["stdlib"]), on_progress=on_progress)
    if not rows:
        raise UserError(
            f"This Python ({sys.executable}) comes without the sources of its standard library, which the example is "
            "made of. Use another Python, or set data.path to rows of your own."
        )
    write_text_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return len(rows)


def find_functions(library: Path, *, on_progress: OnProgress = ignore_progress) -> list[dict[str, str]]:
    """Collect the documented functions of a standard library, without importing any of it.

    Kept are functions and methods of 40 to 800 characters that do something, whose docstring begins with a sentence of
    3 words or more on a line of its own. A source that occurs twice is kept once.

    Args:
        library: the folder of the standard library.
        on_progress: told the files read.

    Returns:
        Rows of ``source`` (docstring removed), ``summary`` and ``module`` (dotted name).
    """
    files = sorted(_library_files(library), key=lambda path: path.relative_to(library).parts)
    rows: list[dict[str, str]] = []
    seen: set[str] = set()
    for done, path in enumerate(files):
        on_progress("Reading the standard library", done, len(files), "files")
        module = ".".join(path.relative_to(library).with_suffix("").parts).removesuffix(".__init__")
        for source, summary in _documented_functions(path):
            if source not in seen:
                seen.add(source)
                rows.append({"source": source, "summary": summary, "module": module})
    on_progress("Reading the standard library", len(files), len(files), "files")
    return rows


def _library_files(library: Path) -> Iterator[Path]:
    # Read as text and parsed, never imported: modules of the library do things when they are imported.
    for folder, inner, files in os.walk(library):
        is_top = Path(folder) == library

        # Distributions put files of their own beside the library; only its own modules are on this list.
        def is_part(name: str, *, is_top: bool = is_top) -> bool:
            return name not in _SKIPPED_FOLDERS and (not is_top or name in sys.stdlib_module_names)

        # Not entered at all: the packages that are installed below the library may have a hundred thousand files.
        inner[:] = filter(is_part, inner)
        for name in files:
            if name.endswith(".py") and is_part(name.removesuffix(".py")):
                yield Path(folder, name)


def _documented_functions(path: Path) -> Iterator[tuple[str, str]]:
    """Yield source and summary of every function of a file that fits the example."""
    try:
        text = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            # Invalid escapes in other people's code matter to nobody who makes the example.
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(text)
    except (SyntaxError, ValueError):  # a few files are there to show broken syntax or another encoding
        return
    lines = text.split("\n")  # as the parser counts them: splitlines() also breaks at form feeds
    for function in _functions(tree.body):
        summary = _summary_of(function)
        source = _source_without_docstring(function, lines) if summary else None
        if source and summary and _MIN_SOURCE_CHARACTERS <= len(source) <= _MAX_SOURCE_CHARACTERS:
            yield source, summary


def _functions(body: list[ast.stmt]) -> Iterator[_FunctionNode]:
    """Yield functions and methods in the order of the file, not those inside other functions."""
    for node in body:
        if isinstance(node, _FunctionNode):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body)
        elif isinstance(node, ast.If | ast.Try):
            yield from _functions([*node.body, *node.orelse])


def _summary_of(function: _FunctionNode) -> str | None:
    """Return the first line of the docstring, up to the end of its sentence; None if it is no sentence."""
    docstring = ast.get_docstring(function)
    if not docstring:
        return None
    paragraph = unicodedata.normalize("NFC", docstring.partition("\n\n")[0])
    summary = " ".join(paragraph.partition("\n")[0].split())
    if not summary.endswith(_SENTENCE_ENDS):
        whole = " ".join(paragraph.split())
        sentence = _FIRST_SENTENCE.match(whole)
        # A paragraph that only lacks the full stop gets it.
        summary = sentence[0] if sentence else f"{whole}."
    # Modules in C are described by their signatures, older ones by doctests or fields of reST.
    is_signature = summary.startswith((f"{function.name}(", ">>>", ":", "@")) or " -> " in summary
    is_sentence = summary[:1].isalpha() and summary[-2:-1].isalnum() | (summary[-2:-1] in ")'\"`*]")
    has_words = len(summary.split()) >= _MIN_SUMMARY_WORDS and len(_LONG_WORD.findall(summary)) > 1
    fits = has_words and len(summary) <= _MAX_SUMMARY_CHARACTERS
    return summary if is_sentence and fits and not is_signature else None


def _source_without_docstring(function: _FunctionNode, lines: list[str]) -> str | None:
    """Return the function's text, decorators included, dedented; None if nothing but the docstring is in it."""
    docstring, *body = function.body
    if not any(_does_something(node) for node in body):
        return None
    first = min([function.lineno, *(node.lineno for node in function.decorator_list)])
    head = lines[first - 1 : docstring.lineno - 1]
    if not head or docstring.end_lineno is None or body[0].lineno <= docstring.end_lineno:
        return None  # def, docstring and body share a line
    tail = lines[docstring.end_lineno : function.end_lineno]
    while tail and not tail[0].strip():
        tail = tail[1:]
    source = textwrap.dedent("\n".join(line.rstrip() for line in [*head, *tail]))
    source = unicodedata.normalize("NFC", source)
    try:
        ast.parse(source)
    except SyntaxError:  # a string over several lines that begins left of the function
        return None
    return source


def _does_something(node: ast.stmt) -> bool:
    """Return whether a statement is more than a placeholder."""
    if isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return False
    if isinstance(node, ast.Raise):
        raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        return not (isinstance(raised, ast.Name) and raised.id == "NotImplementedError")
    return True


def is_example(named: object) -> bool:
    """Return whether the example is all that is named, so that it is read as `example_settings` says.

    Args:
        named: ``data.path``: a path, a source with one, or a list of them.
    """
    if isinstance(named, list) and len(named) == 1:
        named = named[0]
    if isinstance(named, SourceParameters):
        named = named.path
    return isinstance(named, str) and resolve_path(named) == Path(EXAMPLE_PATH)


def names_example(named: object) -> bool:
    """Return whether the example is among the sources that are named.

    Args:
        named: as for `is_example`, or None.
    """
    return any(is_example(item) for item in (named if isinstance(named, list) else [named]))


def example_settings(
    columns: dict[str, str | None], template: str | None, group: str | None
) -> tuple[dict[str, str | None], str | None, str | None]:
    """Return how the example is to be read where the user says nothing about it.

    Args:
        columns: ``data.columns``.
        template: ``data.template``.
        group: ``split.group``.

    Returns:
        The three, filled in: the prompt is rendered from the source, the summary answers, modules stay whole.
    """
    if template is None and not any(columns.values()):
        columns, template = {"response": EXAMPLE_RESPONSE}, EXAMPLE_TEMPLATE
    return columns, template, group or EXAMPLE_GROUP
