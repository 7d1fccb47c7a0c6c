"""Reports as data: sections of paragraphs, tables and charts, written as Markdown, as a page, or for a terminal.

Promises that text from rows appears as it is. May import ``wording`` and what lies below, and no rows. Entry:
``document.Report``.
"""
