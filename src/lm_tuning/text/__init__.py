"""Turn examples into token ids and the spans that are supervised, and read them back.

Promises that every supervised token is a token of an answer, proven by bytes or refused. May import ``data`` and what
lies below. Entry: ``tokenize.write_tokens``; ``store.table.open_split`` reads what it wrote.
"""
