"""Which rows form an optimizer step, how a step is split into micro-batches, and what its loss is.

Promises that a step's loss is one sum divided by one count, however the step is split. May import ``text`` and what
lies below. Entries: ``step_plan.StepPlan``, ``step_loader.StepDataset``, ``tasks.registry.get_task``.
"""
