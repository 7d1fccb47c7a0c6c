"""Carry ranges of characters over to tokens, and prove the result.

The proof is the bytes of each token, or, where a tokenizer names none, that an answer decodes to itself; rows for which
it does not are counted. Knows text and tokens, and no rows. Entry: ``masks.RowEncoder``.
"""
