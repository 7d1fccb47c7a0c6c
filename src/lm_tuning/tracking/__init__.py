"""Tracking that never holds a run up: a journal on disk, a thread that sends it to MLflow, and a way to send it later.

It may import MLflow and ``storage``, and neither Kedro nor hooks, datasets or the domain packages, which import-linter
checks. Entries: ``journal.Journal`` takes facts, ``sender.Sender`` sends them, ``later.send_journals`` sends what is
left.
"""
