"""The example is made of functions that describe themselves, without running any of them."""

from __future__ import annotations

import ast
import json
import statistics
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lm_tuning.data import example
from lm_tuning.data.example import EXAMPLE_TEMPLATE, example_settings, find_functions, make_example
from lm_tuning.errors import UserError

BODY = "\n".join(f"        total_{number} = number + {number}" for number in range(4))


def library_of(folder: Path, **modules: str) -> Path:
    for name, text in modules.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return folder


def documented(name: str, docstring: str, body: str = BODY) -> str:
    return f'    def {name}(self, number):\n        """{docstring}"""\n{body}\n        return number\n\n'


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    path = tmp_path_factory.mktemp("example") / "example" / "functions.jsonl"
    num_rows = make_example(path)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == num_rows
    return rows


def test_the_standard_library_gives_about_four_thousand_rows_of_useful_size(rows):
    assert 3400 < len(rows) < 4800  # some distributions ship without tkinter, which is a tenth
    assert len({row["module"] for row in rows}) > 200
    assert 180 < statistics.mean(len(row["source"]) for row in rows) < 300
    assert max(len(row["source"]) for row in rows) <= 800


def test_every_row_is_a_function_without_its_docstring_and_a_sentence(rows):
    for row in rows:
        (function,) = ast.parse(row["source"]).body
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        assert ast.get_docstring(function) is None
        assert row["summary"][-1] in ".!?"
        assert len(row["summary"].split()) >= 3
        assert "\n" not in row["summary"]
        assert row["summary"] not in row["source"]


def test_no_source_occurs_twice_and_modules_come_in_order(rows):
    assert len({row["source"] for row in rows}) == len(rows)
    modules = list(dict.fromkeys(row["module"] for row in rows))
    assert len(modules) == len({row["module"] for row in rows})  # the rows of a module stand together
    assert not any(part in {"test", "idlelib", "lib2to3"} for module in modules for part in module.split("."))


def test_the_summary_is_the_first_line_up_to_the_end_of_its_sentence(tmp_path):
    kept = {
        "one": "Return the number as it is.",
        "two": "Return the number\n\n        and more",
        "three": "Return a number that needs\n        a second line. And more.",
        "four": "Return e.g. one\n        or another. Done.",
    }
    dropped = {
        "five": "number(x) -> int",
        "six": "Too short.",
        "seven": ">>> number of a doctest",
        "eight": "Long " * 60 + "end.",
    }
    text = "class Numbers:\n" + "".join(documented(name, line) for name, line in {**kept, **dropped}.items())
    rows = find_functions(library_of(tmp_path, json=text))
    assert [row["summary"] for row in rows] == [
        "Return the number as it is.",
        "Return the number.",
        "Return a number that needs a second line.",
        "Return e.g. one or another.",
    ]
    assert rows[0]["source"].startswith("def one(self, number):\n    total_0 = number + 0\n")


def test_functions_that_do_nothing_or_are_there_already_are_left_out(tmp_path):
    text = "class Numbers:\n" + documented("one", "Return the number as it is.")
    nothing = (
        '    def none(self):\n        """Do nothing at all here."""\n        raise NotImplementedError("x" * 80)\n'
    )
    library = library_of(tmp_path, json=text + nothing, ast=text, os__path=text.replace("one", "two"))
    assert [(row["module"], row["source"][:7]) for row in find_functions(library)] == [
        ("ast", "def one"),
        ("os.path", "def two"),
    ]


def test_only_modules_of_the_standard_library_are_read(tmp_path):
    text = "class Numbers:\n" + documented("one", "Return the number as it is.")
    names = ("site-packages__x", "sitecustomize", "json__test__test_x", "idlelib__x", "json__broken")
    library = library_of(tmp_path, **{name: text for name in names[:-1]}, **{names[-1]: "def ("})
    (library / "json" / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n\xe9")
    assert find_functions(library) == []


def test_decorators_and_async_functions_keep_their_lines(tmp_path):
    text = (
        "class Numbers:\n    @property\n    async def one(\n        self,\n        number=1,  # a number\n    ):\n"
        f"        '''Return the number as it is.'''\n\n{BODY}\n"
    )
    (row,) = find_functions(library_of(tmp_path, json=text))
    assert row["source"] == textwrap.dedent(
        f"    @property\n    async def one(\n        self,\n        number=1,  # a number\n    ):\n{BODY}"
    )


def test_making_it_imports_none_of_the_modules(tmp_path):
    code = (
        "import sys; from lm_tuning.data.example import find_functions; from pathlib import Path;"
        "before = set(sys.modules); find_functions(Path(sys.argv[1]));"
        "print(sorted(name for name in set(sys.modules) - before if not name.startswith('encodings')))"
    )
    library = library_of(tmp_path, antigravity="class Numbers:\n" + documented("one", "Return the number as it is."))
    done = subprocess.run([sys.executable, "-c", code, str(library)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_python_without_sources_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(example.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(UserError, match="without the sources of its standard library"):
        make_example(tmp_path / "functions.jsonl")
    assert not (tmp_path / "functions.jsonl").exists()


def test_settings_of_the_example_give_way_to_the_users():
    nothing = {"text": None, "prompt": None, "response": None}
    assert example_settings(nothing, None, None) == ({"response": "summary"}, EXAMPLE_TEMPLATE, "module")
    own = {**nothing, "text": "source"}
    assert example_settings(own, None, "summary") == (own, None, "summary")
    assert example_settings(nothing, "{source}", None)[:2] == (nothing, "{source}")
