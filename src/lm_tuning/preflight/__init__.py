"""Look at the rows as training will see them: counts, lengths, padding, steps, labels, examples, and what is odd.

Nothing here needs torch, model weights or Kedro; :func:`lm_tuning.preflight.figures.inspect_tokens` works from a
notebook.
"""
