"""Training: the step plan, batches, losses, the Trainer subclass, health and checkpoints.

Nothing here knows Kedro or MLflow; :func:`lm_tuning.training.run.run_training` works from a notebook.
"""
