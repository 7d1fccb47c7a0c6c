"""Find phrases that this project does not use, and name the word to use: ``python tools/check_terms.py [FILE ...]``.

``docs/terms.yml`` has the phrases, as patterns, and where they are allowed. Read are source files, the names of tests,
the comments of ``conf``, documents and notebooks. What identifiers are made of counts as words (``first_row``,
``FirstRow``), and a phrase may go on in the next line. Each finding is one line, ``file:line: phrase -> word``, or with
``--count`` one line per word; the exit code is 1 when there is one.
"""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
TERMS = "docs/terms.yml"
# What ends a line and begins the next one inside a sentence: signs of comments, quotes and lists of lines in notebooks.
_LINE_BREAK = re.compile(r'[ \t]*(?:\\n",)?\n[ \t]*(?:(?:#:?|>|")(?=[ \t]|\w)[ \t]*)?(?=\S)')
# Two letters that belong to two words of an identifier, as in numRows, and the underscore of num_rows.
_WORD_EDGE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Za-z0-9])_(?=[A-Za-z0-9])")
_DEFINITION = re.compile(r"^[ \t]*(?:async )?(?:def|class) (\w+)", flags=re.MULTILINE)
# A hash inside a word, as in a colour, begins no comment.
_BEFORE_COMMENT = re.compile(r"^(?:[^#\n]|(?<=\S)#)+", flags=re.MULTILINE)
_BLANK = "\0"


@dataclass(frozen=True)
class Term:
    """A word to use, and what it replaces.

    Attributes:
        word: what to write.
        banned: patterns of what not to write, without regard to case.
        allowed: patterns of contexts, as they stand in the file, in which it may be written all the same.
        files: patterns of paths; the others are not read for this term.
        except_files: patterns of paths among them that are not read either.
    """

    word: str
    banned: re.Pattern[str]
    allowed: tuple[re.Pattern[str], ...]
    files: tuple[str, ...]
    except_files: tuple[str, ...]


@dataclass(frozen=True)
class Hit:
    """One banned phrase.

    Attributes:
        path: relative to the project folder.
        line: where it begins, from 1.
        phrase: as it stands there, identifiers taken apart.
        word: what to write.
    """

    path: str
    line: int
    phrase: str
    word: str

    def __str__(self) -> str:
        """Return the line that is printed."""
        return f"{self.path}:{self.line}: {self.phrase} -> {self.word}"


@dataclass(frozen=True)
class Rules:
    """What ``terms.yml`` says.

    Attributes:
        terms: the words.
        read: patterns of the paths that are read.
        exempt: patterns of the paths that are not, all the same.
        allowed: patterns of contexts in which every phrase may be written.
    """

    terms: tuple[Term, ...]
    read: tuple[str, ...]
    exempt: tuple[str, ...]
    allowed: tuple[re.Pattern[str], ...]

    def covers(self, path: str) -> bool:
        """Return whether a file is read."""
        return _matches(path, self.read) and not _matches(path, self.exempt)


def load_rules(text: str) -> Rules:
    """Read the text of ``terms.yml``.

    Raises:
        re.error: a pattern is none.
        KeyError: a term lacks its word or its patterns.
    """
    given = yaml.safe_load(text)
    stored = "|".join(map(re.escape, given.get("stored_keys", [])))
    # In quotes or backticks, and as the field of a record or a line that describes it.
    spellings = [rf"""(["'`])(?:{stored})\1""", rf"(?m)^ +(?:{stored}): "] if stored else []
    allowed = [*given.get("allow", []), *spellings]
    return Rules(
        terms=tuple(_load_term(term) for term in given["terms"]),
        read=tuple(given["read"]),
        exempt=tuple(given["exempt"]),
        allowed=tuple(map(re.compile, allowed)),
    )


def _load_term(term: dict[str, Any]) -> Term:
    return Term(
        word=term["word"],
        banned=re.compile("|".join(f"(?:{pattern})" for pattern in term["banned"]), flags=re.IGNORECASE | re.ASCII),
        allowed=tuple(map(re.compile, term.get("allow", []))),
        files=tuple(term.get("files", ["*"])),
        except_files=tuple(term.get("except_files", [])),
    )


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)


def find_hits(path: str, text: str, rules: Rules) -> list[Hit]:
    """Return what a file should say in other words, in the order of its lines.

    Args:
        path: relative to the project folder; what is read of a file depends on it.
        text: its content.
        rules: what to look for.
    """
    # The module's own name stands before the first line.
    shown = f"{Path(path).stem}\n\n{_select(path, text)}"
    words, origins = _take_apart(shown)
    exempt = [match.span() for pattern in rules.allowed for match in pattern.finditer(shown)]
    hits = []
    for term in rules.terms:
        if not _matches(path, term.files) or _matches(path, term.except_files):
            continue
        spans: list[tuple[int, int]] | None = None
        for match in term.banned.finditer(words):
            if spans is None:  # most files have none of most phrases
                spans = exempt + [found.span() for pattern in term.allowed for found in pattern.finditer(shown)]
            start, end = origins[match.start()], origins[match.end() - 1] + 1
            if not any(start < last and first < end for first, last in spans):
                line = max(shown.count("\n", 0, start) - 1, 1)
                hits.append(Hit(path, line, " ".join(match[0].split()), term.word))
    return sorted(hits, key=lambda hit: (hit.line, hit.word))


def _take_apart(text: str) -> tuple[str, list[int]]:
    """Return a text's words with one blank between them, and where in the text each character stood."""
    parts, origins, end = [], [], 0
    edges = [*_LINE_BREAK.finditer(text), *_WORD_EDGE.finditer(text)]
    for match in sorted(edges, key=lambda match: match.start()):
        if match.start() < end:
            continue
        parts += [text[end : match.start()], " "]
        origins += [*range(end, match.start()), match.start()]
        end = match.end()
    parts.append(text[end:])
    origins += range(end, len(text))
    return "".join(parts), origins


def _select(path: str, text: str) -> str:
    """Return the text with everything blank that is not to be read; positions stay."""
    if path.startswith("tests/"):
        return _keep_names(text)
    if path.startswith("conf/"):
        return _BEFORE_COMMENT.sub(lambda match: _blank(match[0]), text)
    if path == "CHANGELOG.md":
        released = re.search(r"^## \[\d.*", text, flags=re.MULTILINE | re.DOTALL)
        return text[: released.start()] if released else text
    return text


def _keep_names(text: str) -> str:
    """Blank all of a module but the names of its functions and classes."""
    kept, end = [], 0
    for match in _DEFINITION.finditer(text):
        start, stop = match.span(1)
        kept += [_blank(text[end:start]), text[start:stop]]
        end = stop
    return "".join([*kept, _blank(text[end:])])


def _blank(text: str) -> str:
    return re.sub(r"[^\n]", _BLANK, text)


def main(arguments: list[str]) -> int:
    """Check the files that are named, or all that git knows; print what is found and return the exit code."""
    rules = load_rules((ROOT / TERMS).read_text(encoding="utf-8"))
    counted = "--count" in arguments
    paths = [Path(name).resolve().relative_to(ROOT).as_posix() for name in arguments if name != "--count"]
    if not paths:
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        paths = sorted(path for path in found.split("\0") if path and (ROOT / path).is_file())
    hits = [
        hit
        for path in paths
        if rules.covers(path)
        for hit in find_hits(path, (ROOT / path).read_text(encoding="utf-8"), rules)
    ]
    write = sys.stdout.write
    if counted:
        for word, number in Counter(hit.word for hit in hits).most_common():
            write(f"{number:6,}  {word}\n")
    else:
        for hit in hits:
            write(f"{hit}\n")
    if hits:
        write(f"{len(hits):,} to change; {TERMS} has the words, docs/glossary.md what they mean.\n")
    return 1 if hits else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
