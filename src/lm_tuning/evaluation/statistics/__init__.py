"""Intervals of scores, and whether one model is better than another.

Promises that base, tuned and earlier models are compared row by row, with chance ruled out or said. May import what
``evaluation`` may; knows no model. Entries: ``scored_rows.interval``, ``scored_rows.compare``.
"""
