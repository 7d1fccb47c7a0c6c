"""The pages about recipes and health list what there is, with the values that hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lm_tuning.parameters.health_codes import CODES
from tests.recipes.test_recipes import NO_RECIPES, RECIPES, REPOSITORY, make_loader

PAGES = REPOSITORY / "docs" / "how-to"


def rows_of(page: Path) -> list[list[str]]:
    """Return the cells of all table rows that begin with code."""
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_every_recipe_is_listed_once() -> None:
    listed = [row[0].strip("`") for row in rows_of(PAGES / "recipes.md") if row[0] != "`--env`"]
    assert sorted(listed) == sorted([*RECIPES, *(NO_RECIPES - {"base", "local"})])


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_listed_with_its_model_and_rows(name: str) -> None:
    (row,) = (row for row in rows_of(PAGES / "recipes.md") if row[0] == f"`{name}`")
    parameters = make_loader(name)["parameters"]
    model, method = parameters["model"]["name_or_path"], parameters["train"]["method"]
    assert row[1] == model.removeprefix("data/06_models/base/")
    assert row[3].lower() == method
    if RECIPES[name].is_placed:
        assert f"`{parameters['data']['path']}`" in row[4]
        named = {*re.findall(r"{(\w+)}", parameters["data"]["template"] or ""), *parameters["data"]["columns"].values()}
        assert all(f"`{column}`" in row[4] for column in named - {None})


def test_every_finding_is_listed_with_its_severity_and_meaning() -> None:
    rows = [row for row in rows_of(PAGES / "health.md") if len(row) == 4]
    listed = {row[0].strip("`"): (row[1], row[2]) for row in rows}
    assert len(listed) == len(rows)
    assert listed == {code: (known.severity, known.meaning) for code, known in CODES.items()}
    assert all(row[3] for row in rows)
