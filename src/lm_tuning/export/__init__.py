"""Write a tuned model for use elsewhere, and prove in a process of its own that it is the model that was trained.

Promises that nothing is published whose parity was not shown. May import ``text`` and what lies below; neither
``evaluation`` nor ``training``, nor Kedro nor MLflow. Entry: ``run.export_model``.
"""
