"""Carry ranges of characters over to tokens, and prove the result by the bytes.

Knows text and tokens, and no rows. Entry: ``masks.RowEncoder``.
"""
