"""What columns mean, and how a row of any convention becomes an example of one format.

Knows rows as dicts and no files. Entry: ``examples.example_reader``.
"""
