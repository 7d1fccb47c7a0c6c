"""The architecture page names what there is, draws the layers that are checked, and its worked example runs."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
import yaml

from lm_tuning.parameters.base import TaskName

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "lm_tuning"
PAGE = ROOT / "docs" / "architecture.md"

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
FILE = re.compile(r"[\w.*-]+(?:/[\w.<>*-]+)*\.(?:arrow|csv|db|ini|json|md|py|toml|yml)")
FOLDER = re.compile(r"(?:[\w.<>-]+/)+")
DEFINED = re.compile(r"[A-Z]\w*[a-z]\w*|[A-Z]\w*(?:\.\w+)\(\)|[a-z_]\w*\(\)")
CONSTANT = re.compile(r"[A-Z]+(?:_[A-Z]+)+")
# What a run writes, and a file of the example.
WRITTEN = {"train.csv", "training_summary.csv", "mlflow.db", "mlruns/"}
# Names of other packages.
FOREIGN = {"TrainingArguments"}


def blocks() -> Iterator[tuple[str, str, str]]:
    """Yield language, path in the first line and content of each code block of the worked example."""
    for language, content in FENCE.findall(PAGE.read_text(encoding="utf-8")):
        match = re.match(r"# (?:new file: )?((?:src|tests)/\S+)\n", content)
        if match:
            yield language, match[1], content[match.end() :]


def lines() -> Iterator[tuple[int, str]]:
    """Yield the lines of the page outside code blocks, with their numbers."""
    text = FENCE.sub(lambda block: "\n" * block[0].count("\n"), PAGE.read_text(encoding="utf-8"))
    yield from enumerate(text.splitlines(), 1)


def find(path: str) -> Path | None:
    """Return the file or folder that a path of the page means: below the repository, or below the package."""
    return next((base / path for base in (PACKAGE, ROOT) if (base / path).exists()), None)


@cache
def names_in(file: Path) -> set[str]:
    """Return what a module defines at its top level, and the methods of its classes as ``Class.method``."""
    found: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@cache
def names_in_package() -> set[str]:
    return set().union(*(names_in(file) for file in PACKAGE.rglob("*.py")))


def test_every_path_that_is_named_exists() -> None:
    made = {path for _, path, _ in blocks()}
    catalog = (ROOT / "conf" / "base" / "catalog.yml").read_text(encoding="utf-8").replace("${_output}", "<output>")
    missing = []
    for number, line in lines():
        for span in re.findall(r"`([^`]+)`", line):
            if not (FILE.fullmatch(span) or FOLDER.fullmatch(span)) or span in WRITTEN or span in made:
                continue
            # Folders and files of results: the catalog, or the code that makes them, says where they lie.
            if re.match(r"data/0\d|logs/", span):
                sources = [catalog, *(file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py"))]
                is_there = any(span.rstrip("/") in source for source in sources)
            else:
                is_there = find(span) is not None
            missing += [] if is_there else [f"line {number}: {span}"]
    assert not missing, missing


def test_every_name_is_defined_in_the_file_before_it() -> None:
    wrong = []
    checked = 0
    for number, line in lines():
        placed = re.findall(r"`([^`]+\.py)` `([^`]+)`", line)
        free = set(re.findall(r"`([^`]+)`", line)) - {name for _, name in placed} - FOREIGN
        free = {name for name in free if DEFINED.fullmatch(name) or CONSTANT.fullmatch(name)}
        for path, name in [*placed, *(("", name) for name in free)]:
            file = find(path) if path else None
            known = names_in(file) if file else names_in_package()
            checked += 1
            if name.removesuffix("()") not in known:
                wrong.append(f"line {number}: {name} is not in {path or 'the package'}")
    assert checked > 60
    assert not wrong, wrong


@pytest.mark.parametrize("name", sorted(set(re.findall(r"lm_tuning(?:\.\w+)+", PAGE.read_text(encoding="utf-8")))))
def test_every_dotted_name_resolves(name: str) -> None:
    made = {path.removeprefix("src/").removesuffix(".py").replace("/", ".") for _, path, _ in blocks()}
    if name in made:
        return
    parts = name.split(".")[1:]
    for length in range(len(parts), 0, -1):
        module = PACKAGE.joinpath(*parts[:length])
        if module.is_dir() or module.with_suffix(".py").exists():
            file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
            rest = ".".join(parts[length:])
            assert not rest or rest in names_in(file)
            return
    pytest.fail(f"there is no {name}")


def names_a_task(node: ast.AST) -> bool:
    """Return whether code that compares, or a mapping by task, names one: as text or by its constant."""
    if isinstance(node, ast.Dict):
        parts = [part for key in node.keys if key is not None for part in ast.walk(key)]
    else:
        parts = [*ast.walk(node)] if isinstance(node, ast.Compare) else []
    names = set(get_args(TaskName))
    return any(
        (isinstance(part, ast.Constant) and part.value in names)
        or (isinstance(part, ast.Name) and part.id.isupper() and part.id.lower() in names)
        for part in parts
    )


def test_every_module_that_asks_for_a_task_by_name_is_listed() -> None:
    asking = {
        file.relative_to(PACKAGE).as_posix()
        for file in PACKAGE.rglob("*.py")
        if any(names_a_task(node) for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    }
    listed = re.search(r"By package, they are\n\n(.*?)\n\n", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert listed is not None
    assert set(re.findall(r"`([^`]+)`", listed[1])) == asking


def test_every_catalog_entry_that_is_named_exists() -> None:
    catalog = yaml.safe_load((ROOT / "conf" / "base" / "catalog.yml").read_text(encoding="utf-8"))
    section = PAGE.read_text(encoding="utf-8").split("\n## What is stored where\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", section, flags=re.MULTILINE)
    assert len(rows) > 6
    for name, path in rows:
        stored = catalog[name]["filepath"].replace("${_output}", "<output>")
        assert stored == path.rstrip("/"), name


def test_the_learning_rate_is_the_one_in_the_file() -> None:
    given = yaml.safe_load((ROOT / "conf" / "base" / "parameters_train.yml").read_text(encoding="utf-8"))
    (shown,) = re.findall(r"`learning_rate: (\S+)`", PAGE.read_text(encoding="utf-8"))
    assert float(shown) == given["train"]["learning_rate"]


def test_the_layers_are_those_that_are_checked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = (known for known in project["tool"]["importlinter"]["contracts"] if known["id"] == "layers")
    checked = [layer.replace("lm_tuning.", "") for layer in contract["layers"]]
    (drawn,) = (block for language, block in FENCE.findall(PAGE.read_text(encoding="utf-8")) if language == "text")
    assert [re.split(r" {2,}", line)[0] for line in drawn.splitlines()] == checked


def apply(folder: Path) -> list[Path]:
    """Make the changes of the worked example in a copy of the package; return its tests."""
    tests = []
    for language, path, content in blocks():
        file = folder / path.removeprefix("src/")
        file.parent.mkdir(parents=True, exist_ok=True)
        if language == "diff":
            old = "".join(f"{line[1:]}\n" for line in content.splitlines() if not line.startswith("+"))
            new = "".join(f"{line[1:]}\n" for line in content.splitlines() if not line.startswith("-"))
            source = file.read_text(encoding="utf-8")
            assert source.count(old) == 1, f"the change of {path} finds its lines {source.count(old)} times"
            file.write_text(source.replace(old, new), encoding="utf-8")
        else:
            assert not file.exists(), f"{path} is there already: take another example"
            file.write_text(content, encoding="utf-8")
        tests += [file] if path.startswith("tests/") else []
    return tests


def test_the_worked_example_runs(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "lm_tuning", ignore=shutil.ignore_patterns("__pycache__"))
    tests = apply(tmp_path)
    assert tests
    # Before the checkout's own package, behind the guard of these tests.
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(tmp_path)]))
    command = [sys.executable, "-m", "pytest", *map(str, tests), "-q", "-p", "no:cacheprovider", "--rootdir", "."]
    done = subprocess.run(
        [*command, "--basetemp", str(tmp_path / "made")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_worked_example_follows_the_style() -> None:
    for language, path, content in blocks():
        if language == "python":
            command = [sys.executable, "-m", "ruff"]
            for tool in (["check"], ["format", "--check"]):
                done = subprocess.run(
                    [*command, *tool, "--no-cache", "--stdin-filename", path, "-"],
                    cwd=ROOT,
                    input=content,
                    capture_output=True,
                    text=True,
                    check=False,
                )
                assert done.returncode == 0, (path, done.stdout, done.stderr)
