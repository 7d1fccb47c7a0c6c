"""Name the class of rows in a file, by a tuned classifier.

Promises that every row that can be read gets one line, in the order of the file, and that work which was stopped goes
on. May import ``evaluation`` and what lies below, not ``training``. Entry: ``run.predict_rows``.
"""
