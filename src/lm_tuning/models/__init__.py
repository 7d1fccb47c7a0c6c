"""Find, convert, describe and load language models.

Promises errors that say how to fix them, and that no foreign code runs unless ``model.trust_remote_code`` allows it.
May import ``progress``, ``storage`` and ``runtime``. Entry: ``loading``.
"""
