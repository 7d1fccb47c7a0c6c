"""Strings that terminals, Rich, Markdown and HTML would read as something else than text."""

from __future__ import annotations

HOSTILE = (
    "[INST] what 1? [/INST]",
    "[/rare]",
    "[b]bold 28[/b]",
    "[red]x",
    "[link=http://x]y[/link]",
    "[@click=app.quit]z[/]",
    ":warning: :smile:",
    "%s %d {0} {name} $HOME ${x}",
    "a|b||c",
    "`code` ``more`` ```",
    "<script>alert(1)</script>",
    "<b>&amp;&lt;</b>",
    "[text](http://example.com)",
    "![image](x.png)",
    "*stars* _lines_ __both__ ~~gone~~",
    "# heading",
    "- item",
    "+ item",
    "1. item",
    "> quote",
    "--- ===",
    "back\\slash \\[b] \\n",
    "two\nlines",
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "over\rwritten",
)
"""Of each, `visible` shows every character."""

ON_ONE_LINE = tuple(text for text in HOSTILE if "\n" not in text)
