"""One file for each task: how its rows become tensors, and which logits carry loss.

A new task is a subclass of ``base.TrainingTask``, named in ``registry``. May import what ``batching`` may. Entry:
``registry.get_task``.
"""
