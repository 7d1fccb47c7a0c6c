"""Check every row once, and keep what can be used beside what was found.

May import ``readers``, ``format`` and ``store``. Entry: ``checked.write_checked_rows``.
"""
