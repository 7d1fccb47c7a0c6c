"""The modules of a source, as they lie or in a git revision, for the benchmarks that look at the code itself."""

from __future__ import annotations

import ast
import io
import subprocess
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

AS_THEY_LIE = "."

MAPPINGS = {"dict", "Dict", "Mapping", "MutableMapping", "defaultdict", "DefaultDict", "OrderedDict"}
ANYTHING = {"Any", "object"}

NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTION)


@dataclass(frozen=True)
class Module:
    """One source file.

    Attributes:
        path: relative to what is counted.
        name: dotted, as it is imported.
        text: its content.
    """

    path: PurePosixPath
    name: str
    text: str

    @property
    def is_package(self) -> bool:
        """Whether it is a package's ``__init__``."""
        return self.path.stem == "__init__"

    @property
    def package(self) -> str:
        """The package below the root package that it belongs to; the root package for modules directly in it."""
        parts = self.name.split(".")
        depth = 2 if len(parts) > 2 or (self.is_package and len(parts) == 2) else 1
        return ".".join(parts[:depth])

    @property
    def num_lines(self) -> int:
        """All lines."""
        return len(io.StringIO(self.text).readlines())

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text, filename=str(self.path))

    @cached_property
    def code_lines(self) -> set[int]:
        """Numbers of the lines that hold code."""
        lines: set[int] = set()
        documentation = set(self._docstring_positions())
        for token in self._tokens():
            if token.type not in NO_CODE and token.start not in documentation:
                lines.update(range(token.start[0], token.end[0] + 1))
        return lines

    @cached_property
    def comment_lines(self) -> set[int]:
        """Numbers of the lines that hold a comment alone."""
        commented = {token.start[0] for token in self._tokens() if token.type == tokenize.COMMENT}
        return commented - self.code_lines

    def _tokens(self) -> Iterator[tokenize.TokenInfo]:
        return tokenize.generate_tokens(io.StringIO(self.text).readline)

    def _docstring_positions(self) -> Iterator[tuple[int, int]]:
        """Yield where docstrings begin, by line and by column in characters as ``tokenize`` counts them."""
        lines = io.StringIO(self.text).readlines()  # a form feed ends no line here
        for node in ast.walk(self.tree):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                start = node.body[0]
                before = lines[start.lineno - 1].encode()[: start.col_offset]
                yield start.lineno, len(before.decode())

    @cached_property
    def bindings(self) -> dict[str, str]:
        """What imported names stand for, dotted: ``{"Row": "lm_tuning.data.reading.Row"}``."""
        found: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                origin = self.origin(node)
                found |= {alias.asname or alias.name: f"{origin}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    found[alias.asname or first] = alias.name if alias.asname else first
        return found

    def origin(self, node: ast.ImportFrom) -> str:
        """Return the absolute name of the module that ``from … import`` names."""
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        kept = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*kept, *([node.module] if node.module else [])])


@dataclass
class Source:
    """All modules of one revision.

    Attributes:
        modules: by dotted name.
        aliases: dotted names of aliases with an untyped mapping inside.
    """

    modules: dict[str, Module]
    aliases: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Collect the aliases, until none is found that stands for another one."""
        while found := {name for module in self.modules.values() for name in self._aliases_of(module)} - self.aliases:
            self.aliases |= found

    def _aliases_of(self, module: Module) -> Iterator[str]:
        for node in outside_functions(module.tree.body):
            target, value = None, None
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                target, value = node.targets[0], node.value
            elif isinstance(node, ast.AnnAssign) and "TypeAlias" in ast.unparse(node.annotation):
                target, value = node.target, node.value
            elif type(node).__name__ == "TypeAlias":  # Python 3.12's `type X = ...`
                target, value = node.name, node.value  # type: ignore[attr-defined]
            is_type = isinstance(value, ast.Subscript | ast.BinOp | ast.Name | ast.Attribute | ast.Constant)
            if isinstance(target, ast.Name) and value is not None and is_type:
                plain_text = isinstance(node, ast.Assign) and isinstance(value, ast.Constant)
                if not plain_text and self.untyped_in(value, module).total():
                    yield f"{module.name}.{target.id}"

    def untyped_in(self, type_: ast.expr, module: Module) -> Counter[str]:
        """Count the untyped mappings in a type: ``written out``, or ``by alias``."""
        found: Counter[str] = Counter()
        if isinstance(type_, ast.Constant) and isinstance(type_.value, str):
            try:
                return self.untyped_in(ast.parse(type_.value.strip(), mode="eval").body, module)
            except SyntaxError:
                return found
        if isinstance(type_, ast.Name | ast.Attribute):
            name = self.resolve(type_, module)
            found["by alias"] += name in self.aliases
            found["written out"] += name.rpartition(".")[2] in MAPPINGS and name not in self.aliases
            return found
        if isinstance(type_, ast.Subscript):
            name = self.resolve(type_.value, module).rpartition(".")[2]
            inner = type_.slice.elts if isinstance(type_.slice, ast.Tuple) else [type_.slice]
            if name == "Literal":
                return found
            if name in MAPPINGS:
                found["written out"] += self._is_anything(inner[-1], module)
            for part in inner[:1] if name == "Annotated" else inner:
                found += self.untyped_in(part, module)
            if name not in MAPPINGS:
                found += self.untyped_in(type_.value, module)
            return found
        for child in ast.iter_child_nodes(type_):
            if isinstance(child, ast.expr):
                found += self.untyped_in(child, module)
        return found

    def _is_anything(self, type_: ast.expr, module: Module) -> bool:
        if isinstance(type_, ast.BinOp):
            return self._is_anything(type_.left, module) or self._is_anything(type_.right, module)
        return self.resolve(type_, module).rpartition(".")[2] in ANYTHING

    def resolve(self, name: ast.expr, module: Module) -> str:
        """Return what a name stands for, dotted, through the imports that lead to it; empty where it is no name."""
        first, *rest = ast.unparse(name).split(".") if isinstance(name, ast.Name | ast.Attribute) else [""]
        dotted = ".".join([module.bindings.get(first) or f"{module.name}.{first}", *rest])
        for _ in range(10):  # a package may hand on what it has from another, and that again
            owner, _, last = dotted.rpartition(".")
            if owner not in self.modules or last not in self.modules[owner].bindings:
                break
            dotted = self.modules[owner].bindings[last]
        return dotted


def outside_functions(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, also those under ``if`` and ``try``."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            yield from outside_functions(
                child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt)
            )


def read_source(path: Path, revision: str) -> Source:
    """Read the modules below a folder, as they lie or in a revision of the repository that the folder is in."""
    if revision == AS_THEY_LIE:
        texts = {
            PurePosixPath(file.relative_to(path).as_posix()): file.read_text("utf-8") for file in path.rglob("*.py")
        }
    else:
        texts = dict(read_revision(path, revision))
    if not texts:
        raise SystemExit(f"No Python file in {path} ({'as it lies' if revision == AS_THEY_LIE else revision}).")
    around = [path.name] if PurePosixPath("__init__.py") in texts else []
    modules = {}
    for file, text in sorted(texts.items()):
        parts = [*around, *file.parts[:-1], *([] if file.stem == "__init__" else [file.stem])]
        modules[".".join(parts)] = Module(file, ".".join(parts), text)
    return Source(modules)


def read_revision(path: Path, revision: str) -> Iterator[tuple[PurePosixPath, str]]:
    """Yield the Python files below a folder in a revision."""
    inside = next(folder for folder in (path, *path.parents) if folder.is_dir())
    top = Path(run_git(inside, "rev-parse", "--show-toplevel").decode().strip())
    folder = path.relative_to(top).as_posix()
    content = run_git(top, "archive", "--format=tar", revision, "--", folder)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            file = PurePosixPath(member.name)
            if member.isfile() and file.suffix == ".py":
                stream = archive.extractfile(member)
                assert stream is not None
                yield file.relative_to(folder), stream.read().decode()


def run_git(folder: Path, *arguments: str) -> bytes:
    """Run git and return what it prints."""
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)} in {folder}: {done.stderr.decode().strip()}")
    return done.stdout
