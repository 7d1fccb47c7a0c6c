"""Train a model on stored tokens, and say whether it went right.

Promises what ``batching`` promises, a resume that repeats the run, and findings before money is spent. May import
``generation`` and what lies below; neither ``evaluation`` nor Kedro nor MLflow. Entry: ``run.run_training``, from a
notebook too.
"""
