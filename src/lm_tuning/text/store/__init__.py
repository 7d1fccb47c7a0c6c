"""Tokenized rows in Arrow files that training reads without copying.

Knows neither templates nor tokenizers. Entries: ``table.TokenTableWriter`` and ``table.open_split``.
"""
