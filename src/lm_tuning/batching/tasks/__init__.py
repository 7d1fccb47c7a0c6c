"""How the rows of a task become tensors, and which logits carry loss.

A new task is a subclass of ``base.TrainingTask`` in ``kinds``. May import what ``batching`` may. Entry:
``kinds.get_task``.
"""
