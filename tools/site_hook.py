"""Lets the pages that are written for a git host work on the documentation site too (``hooks`` of mkdocs.yml).

Two things differ there. README, changelog and the other pages of the project folder lie outside of ``docs/``, so they
are added to the site and links to and from them are rewritten. And list items are indented by two blanks, where
Python-Markdown by itself asks for four.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# Pages of the project folder, and their names on the site. The name README.md would be taken for index.md.
PROJECT_PAGES = {
    "README.md": "readme.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
_FROM_SITE = {name: source for source, name in PROJECT_PAGES.items()}
_CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]+`", flags=re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^)\s]+)\)")

# MkDocs counts the warnings of its own loggers, and `strict` ends a build that has any.
log = logging.getLogger("mkdocs.hooks.site")


def rewrite_links(text: str, page: str) -> str:
    """Return a page's Markdown with its links made for the site.

    Args:
        text: the page as it is written, with links that work on a git host
        page: its name on the site, such as ``how-to/tests.md``

    A link to a file of the repository that is not on the site, such as a source file, becomes its text.
    """
    source = _FROM_SITE.get(page, f"docs/{page}")
    blocks = [match.span() for match in _CODE.finditer(text)]

    def rewrite(match: re.Match[str]) -> str:
        target, _, anchor = match["target"].partition("#")
        in_code = any(start <= match.start() and match.end() <= end for start, end in blocks)
        if in_code or not target or re.match(r"[a-z]+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if not (ROOT / path).exists():
            log.warning("%s links to %s, which is not in the repository", source, target)
            return match[0]
        name = PROJECT_PAGES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        label = rewrite_links(match["text"], page)  # a picture may be what is clicked on
        if name is None:
            return label
        relative = posixpath.relpath(name, posixpath.dirname(page) or ".")
        return f"{match['image']}[{label}]({relative}{'#' + anchor if anchor else ''})"

    return _LINK.sub(rewrite, text)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Let the Markdown of the site read list items that are indented by two blanks."""
    from markdown import Markdown
    from markdown.blockprocessors import CodeBlockProcessor, ListIndentProcessor, OListProcessor, UListProcessor
    from markdown.extensions import Extension

    class ShortIndents(Extension):
        """Two blanks are one level of a list, as on a git host."""

        def extendMarkdown(self, md: Markdown) -> None:
            md.tab_length = 2
            # These keep the width that stood when they were made.
            processors: list[tuple[type[Any], str, int]] = [
                (ListIndentProcessor, "indent", 90),
                (CodeBlockProcessor, "code", 80),
                (OListProcessor, "olist", 40),
                (UListProcessor, "ulist", 30),
            ]
            for processor, name, priority in processors:
                md.parser.blockprocessors.register(processor(md.parser), name, priority)

    # First, so that extensions that put their own list processors in place still do.
    config.markdown_extensions.insert(0, ShortIndents())  # type: ignore[arg-type]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the project folder."""
    from mkdocs.structure.files import File

    for source, name in PROJECT_PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Rewrite the links of one page."""
    return rewrite_links(markdown, page.file.src_uri)


def on_serve(server: Any, **_: object) -> Any:
    """Build again when a page of the project folder changes."""
    for source in PROJECT_PAGES:
        server.watch(str(ROOT / source))
    return server
