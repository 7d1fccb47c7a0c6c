"""Divide rows into splits: exact in size, the same for a seed, and never across copies or groups.

Works on checked rows alone. Entry: ``folder.write_splits``.
"""
