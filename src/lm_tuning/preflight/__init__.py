"""Look at the rows as training will see them: counts, lengths, padding, steps, labels, examples, and what is odd.

Promises to need neither torch nor model weights, and to show the steps that training will make. May import ``training``
and what lies below; neither Kedro nor MLflow. Entries: ``figures.inspect_run``, or ``figures.inspect_tokens`` from a
notebook; ``report.compose_report`` shows what they found.
"""
