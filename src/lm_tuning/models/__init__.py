"""Find, convert, describe and load language models.

Promises errors that say how to fix them, and that no foreign code runs. May import ``progress``, ``storage`` and
``runtime``. Entry: ``loading``.
"""
