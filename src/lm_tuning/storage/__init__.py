"""Keep files and folders whole: written aside, then renamed; found again by key; locked while in use.

May import ``parameters``, ``errors`` and ``secrets``. Entry: ``folders.FolderStore``.
"""
