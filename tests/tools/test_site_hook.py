"""Pages that are written for a git host work on the documentation site, and every page has its place in the menu."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from tools.site_hook import PROJECT_PAGES, ROOT, rewrite_links

SETTINGS = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("page", "written", "shown"),
    [
        ("index.md", "[a](tutorial.md)", "[a](tutorial.md)"),
        ("index.md", "[a](../README.md#own-data)", "[a](readme.md#own-data)"),
        ("how-to/tests.md", "[a](../../CHANGELOG.md)", "[a](../changelog.md)"),
        ("how-to/tests.md", "![a](../images/kedro_viz.png)", "![a](../images/kedro_viz.png)"),
        ("readme.md", "[a](docs/how-to/tests.md#a)", "[a](how-to/tests.md#a)"),
        ("readme.md", "[`a`](CHANGELOG.md), [b](LICENSE)", "[`a`](changelog.md), b"),
        ("readme.md", "[![a](docs/images/kedro_viz.png)](docs/index.md)", "[![a](images/kedro_viz.png)](index.md)"),
        ("index.md", "[a](https://kedro.org), [b](#b)", "[a](https://kedro.org), [b](#b)"),
        ("index.md", "`[a](../README.md)`\n\n```\n[a](../README.md)\n```\n", None),
    ],
)
def test_links_lead_to_pages_of_the_site(page: str, written: str, shown: str | None) -> None:
    assert rewrite_links(written, page) == (written if shown is None else shown)


def test_a_link_to_nothing_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert rewrite_links("[a](../nothing.py)", "index.md") == "[a](../nothing.py)"
    assert "docs/index.md links to ../nothing.py, which is not in the repository" in caplog.text


def test_every_page_is_in_the_menu_once() -> None:
    listed = re.findall(r"^ +- .*?: (\S+\.md)$", SETTINGS, flags=re.MULTILINE)
    docs = ROOT / "docs"
    pages = [path.relative_to(docs).as_posix() for path in docs.rglob("*.md")]
    assert sorted(listed) == sorted([*pages, *PROJECT_PAGES.values()])
    assert all((ROOT / source).exists() for source in PROJECT_PAGES)


def test_nothing_is_loaded_from_other_hosts() -> None:
    assert "font: false" in SETTINGS
    assert not re.search(r"https?://|analytics:|repo_url", re.sub(r"^ *#.*", "", SETTINGS, flags=re.MULTILINE))


def test_lists_come_after_a_blank_line() -> None:
    """A git host begins a list right after a line of text; Python-Markdown makes one paragraph of both."""
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / source for source in PROJECT_PAGES)]
    for page in pages:
        text = re.sub(r"^ *```.*?^ *```", "", Path(page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        joined = re.search(r"^(?![ ]*(?:[-*] |\d+\. |$))\S.*\n[-*] .*", text, flags=re.MULTILINE)
        assert joined is None, f"{page.name}: {joined and joined[0]}"
