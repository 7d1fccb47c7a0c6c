"""Turn examples into token ids and the spans that are supervised, and read them back.

Promises that every supervised token is a token of an answer, proven by bytes, or aligned by the tokenizer and counted
where it does not decode to itself. May import ``data`` and what lies below. Entries: ``tokenize.make_tokens`` and
``tokenize.write_tokens``; ``store.table.open_split`` reads what they wrote.
"""
