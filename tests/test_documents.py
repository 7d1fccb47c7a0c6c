"""What README and docs name is there: files, parameters, pipelines and command-line options."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from lm_tuning.parameters.schema import find_entry, parameter_schema

ROOT = Path(__file__).parents[1]
TOP_PAGES = [ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")]
PAGES = [*TOP_PAGES, *sorted((ROOT / "docs").rglob("*.md"))]
GROUPS = sorted(parameter_schema()["properties"])
PARAMETER = re.compile(rf"(?:{'|'.join(GROUPS)})(?:\.[a-z_0-9]+)+")
# File names and modules that look like a parameter of the same first word.
FILE_ENDINGS = {"csv", "db", "ipynb", "json", "jsonl", "md", "parquet", "png", "py", "sh", "toml", "yml", "html"}
# The tutorial makes this mistake to show the message.
WRONG_ON_PURPOSE = {"train.lora.rank"}
# What lab log and changelog call by the names of their time.
EARLIER_NAMES = {"evaluate.max_new_tokens", "evaluate.num_beams"}
HISTORY = ("CHANGELOG.md", "lab-log.md")


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def flatten(values: object, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every leaf in nested dicts."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from flatten(value, (*prefix, str(key)))
    else:
        yield prefix


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target) and not target.startswith("#"):
            assert (page.parent / target.partition("#")[0]).exists(), f"{page_id(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_parameters_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set()
    for code in [*re.findall(r"`([^`\n]+)`", text), *re.findall(r"--params[ =]\"?([^\"`\n]+)", text)]:
        for match in PARAMETER.finditer(code):
            before = code[: match.start()]
            if not before.endswith(("/", ".", "_")) and match.group().rsplit(".", 1)[1] not in FILE_ENDINGS:
                named.add(match.group())
    for name in named - WRONG_ON_PURPOSE - (EARLIER_NAMES if page.name in HISTORY else set()):
        assert find_entry(name.split(".")) is not None, f"{page_id(page)} names the parameter {name}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_yaml_blocks_hold_parameters(page: Path) -> None:
    for block in re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
        values = yaml.safe_load(block)
        if isinstance(values, dict) and set(values) <= set(GROUPS):
            for path in flatten(values):
                assert find_entry(path) is not None, f"{page_id(page)} names the parameter {'.'.join(path)}"


def test_the_readme_shows_the_overlay_as_it_is() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"```yaml\n# (conf/\S+)\n(.*?)```", readme, flags=re.DOTALL))
    assert set(shown) == {"conf/gsm8k/globals.yml", "conf/gsm8k/parameters.yml"}
    for name, block in shown.items():
        real = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
        for path in flatten(yaml.safe_load(block)):
            if path[0] == "model":
                continue  # shown for its keys; the overlay leaves the default model in place
            expected, value = real, yaml.safe_load(block)
            for key in path:
                expected, value = expected[key], value[key]
            assert value == expected, f"README and {name} differ in {'.'.join(path)}"


def test_pipelines_that_are_named_exist() -> None:
    from lm_tuning.pipeline_registry import register_pipelines

    known = set(register_pipelines())
    named = {
        name
        for page in PAGES
        for names in re.findall(r"--pipelines?=([a-z_,]+)", page.read_text(encoding="utf-8"))
        for name in names.split(",")
    }
    assert named
    assert named <= known


def test_the_decisions_give_every_dependency_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lists = [project["project"]["dependencies"], *project["project"]["optional-dependencies"].values()]
    lists += [project["dependency-groups"]["model"], project["dependency-groups"]["docs"]]
    required = {re.split(r"[^\w.-]", line)[0] for lines in lists for line in lines}
    table = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8").split("## Dependencies")[1].split("\n## ")[0]
    first_cells = re.findall(r"^\| ([a-z][^|]*?)(?: \([^)]*\))? \|", table, flags=re.MULTILINE)
    explained = {name for cell in first_cells for name in cell.split(", ")} - {"package"}
    assert explained == required
