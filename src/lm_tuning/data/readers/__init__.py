"""One file for each kind of file: stream its rows as dicts, each with its number, without guessing a type.

A new format is a subclass of ``base.RowSource``, named in ``open``. May import ``sources`` and ``format.nested``.
Entry: ``open.open_rows``.
"""
