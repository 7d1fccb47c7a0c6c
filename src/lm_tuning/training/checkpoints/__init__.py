"""Checkpoints that are whole or not there, and what makes a run like another one.

Promises that a stopped run goes on where it stopped. Entries: ``format``, ``resume.find_checkpoint`` and
``saving.KeepsCheckpoints``.
"""
