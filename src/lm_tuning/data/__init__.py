"""Read rows of any shape, bring them to one of four formats, check them, and split them.

Promises that no row is lost or changed without being counted and named. May import ``models`` and what lies below.
Entries: ``check.checked.write_checked_rows``, then ``split.folder.write_splits``; ``store`` keeps the rows.
"""
