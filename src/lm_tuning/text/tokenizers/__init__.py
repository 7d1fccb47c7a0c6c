"""One file for each task: rendered rows in, token ids and spans out, within the limits on length.

A new task is a subclass of ``base.TaskTokenizer``. May import ``render``, ``align`` and ``store``.
"""
