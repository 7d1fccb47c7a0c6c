"""Choose micro-batches by speed and memory, before a training and when memory runs out.

Promises never to change a step, only how it is split. Entry: ``planner.choose_batches``.
"""
