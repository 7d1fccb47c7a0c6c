"""Score answers: ROUGE, BLEU, chrF, exact match, JSON, and functions of a project's own.

Promises that every score comes with a signature, as what each row adds to it, and equals the usual tool where both
define the same. May import what ``evaluation`` may; knows no model. Entries: ``score.check_scores``, ``score.Scorer``.
"""
