"""Keep files and folders whole: written aside, then renamed; found again by key; locked while in use.

Promises that a killed run leaves the old content or the new one, never a part of it. May import ``parameters``,
``errors`` and what lies below. Entry: ``folders.FolderStore``.
"""
