"""The counts of a source whose right ones can be read off."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/code_size.py"

Run = Callable[..., str]

LINES = '''"""A docstring
over two lines."""

# A comment.
import os  # no comment line

TEXT = """a string

that is code, over four lines
"""


class Row:
    """One line."""

    name: str = "x"
    """What stands behind an attribute is no docstring."""

    def read(self) -> str: "docstring"; return os.sep


def write(
    row: Row,  # behind code
) -> None:
    # Another comment.
    """A docstring."""
    é = "é"; """a string behind a docstring's line"""
    print(row, é)
'''
"""Code: import, four of TEXT, class, name, its string, read, three of write's head, two of its body: 14."""

TYPES = """
from __future__ import annotations
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pack import handed_on as given
from pack.aliases import Row, Rows as Many
import pack.aliases

Own: TypeAlias = "dict[str, Any]"
No = {"Row": dict}["Row"]
typed: dict[str, int] = {}
one: dict[str, Any] = {}
two: list[Mapping[str, object]] | None = None
three: "typing.Mapping[str, Any | None]"
bare: dict = {}
nested: dict[str, dict[int, Any]]
noted: Annotated[str, dict[str, Any]]
words: Literal["Row", "dict[str, Any]"]


def call(row: Row, rows: Many, own: Own, *rest: pack.aliases.Row, **more: given) -> Callable[[dict[str, Any]], None]:
    inner: Row = dict[str, Any]()
"""
"""Written out: one, two, three, bare, nested, the result; by alias: row, rows, own, rest, more, inner."""

NODES = "def short(\n    x,\n):\n" + "    x = 1\n" * 17 + "\n\ndef long(\n    x,\n):\n" + "    x = 1\n\n" * 18


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = folder / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return folder / "src"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the script with arguments and return what it prints."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return capsys.readouterr().out

    return run


def count(run: Run, *arguments: object) -> dict[str, Any]:
    counted: dict[str, Any] = json.loads(run(*arguments, "--json"))
    return counted


def test_lines_are_told_apart(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path, {"pack/__init__.py": "", "pack/lines.py": LINES, "pack/deep/long.py": "x = 1\n" * 401})
    counted = count(run, path, "--longest", 1)["."]
    assert counted["files"] == 3
    assert counted["lines"] == len(LINES.splitlines()) + 401
    assert counted["packages"]["pack"] == {
        "files": 2,
        "lines": 28,
        "code_lines": 14,
        "comment_lines": 2,
        "comments_per_100_code_lines": 14.29,
        "untyped_mappings": 0,
        "untyped_mappings_by_alias": 0,
    }
    assert counted["packages"]["pack.deep"]["code_lines"] == 401
    assert counted["files_over_400_lines"] == 1
    assert counted["longest_files"] == {"pack/deep/long.py": 401}


def test_untyped_mappings_are_found_under_every_name(run: Run, tmp_path: Path) -> None:
    files = {
        "pack/__init__.py": "from pack.aliases import Again as handed_on\n",
        "pack/aliases.py": "from typing import Any\nRow = dict[str, Any]\nAgain = Row\nRows = list[Row]\n",
        "pack/types.py": TYPES,
    }
    counted = count(run, write(tmp_path, files))["."]
    assert counted["untyped_mappings_by_alias"] == 6
    assert counted["untyped_mappings"] == 6 + 6


def test_long_functions_of_nodes_are_listed(run: Run, tmp_path: Path) -> None:
    files = {"pack/pipelines/a/nodes.py": NODES, "pack/pipelines/a/other.py": NODES, "pack/nodes.py": NODES}
    (long,) = count(run, write(tmp_path, files))["."]["nodes_over_20_lines"]
    assert long == {"function": "pack.pipelines.a.nodes.long", "lines": 21, "body": 18}


@pytest.mark.parametrize(
    ("there", "back", "kind"),
    [
        ("import pack.b.two", "from ..a import one", "modules_when_loaded"),
        ("from pack.b import two", "def f():\n    from pack.a.one import x", "modules_with_functions"),
        ("from pack.b.two import y", "if TYPE_CHECKING:\n    from pack.a.one import x", "modules_with_types"),
        ("import importlib\nimportlib.import_module('pack.b.two')", "import pack.a.one", "modules_when_loaded"),
    ],
)
def test_circles_are_found_by_the_imports_that_close_them(
    run: Run, tmp_path: Path, there: str, back: str, kind: str
) -> None:
    files = {f"pack/{name}/__init__.py": "" for name in ("a", "b")} | {"pack/__init__.py": ""}
    files |= {"pack/a/one.py": there, "pack/b/two.py": back, "pack/b/three.py": "from pack.b import two"}
    circles = count(run, write(tmp_path, files))["."]["circles"]
    kinds = ["modules_when_loaded", "modules_with_functions", "modules_with_types"]
    for each in kinds:
        assert circles[each] == ([["pack.a.one", "pack.b.two"]] if kinds.index(each) >= kinds.index(kind) else []), each
    assert circles["packages_with_all"] == [["pack.a", "pack.b"]]
    assert bool(circles["packages_when_loaded"]) == (kind == "modules_when_loaded")


def test_what_a_package_loads_on_the_way_closes_a_circle_too(run: Run, tmp_path: Path) -> None:
    files = {
        "pack/__init__.py": "",
        "pack/a/__init__.py": "from pack.a.user import x",  # children of a package may be loaded by it
        "pack/a/user.py": "from pack.b.plain import y\nfrom pack.a import helper",
        "pack/a/helper.py": "",
        "pack/b/__init__.py": "import pack.a.user",
        "pack/b/plain.py": "",
        "pack/c.py": "from pack.a import x",
    }
    circles = count(run, write(tmp_path, files))["."]["circles"]
    assert circles["modules_when_loaded"] == [["pack.a", "pack.a.user", "pack.b"]]


def test_revisions_stand_beside_the_files_as_they_lie(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path, {"pack/__init__.py": "", "pack/one.py": "x = 1\n", "pack/gone.py": "x = 1\n" * 5})
    git = ["git", "-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    (path / "pack/gone.py").unlink()
    (path / "pack/one.py").write_text("x = 1\ny = 2\n")
    counted = count(run, path, "--revision", "HEAD", ".")
    assert [(revision, c["files"], c["code_lines"]) for revision, c in counted.items()] == [("HEAD", 3, 6), (".", 2, 2)]
    shown = run(path, "--revision", "HEAD", ".")
    assert any(line.split() == ["code", "lines", "6", "2"] for line in shown.splitlines()), shown


def test_a_folder_without_source_and_an_unknown_revision_are_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="No Python file"):
        run(tmp_path)
    with pytest.raises(SystemExit, match="nothing-like-it"):
        run("--revision", "nothing-like-it")
