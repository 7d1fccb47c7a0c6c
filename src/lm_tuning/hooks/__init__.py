"""Kedro hooks: what happens around a run: parameters, environment, locks, stopping, the run in MLflow.

Promises that parameters are checked before any node runs, and that tracking holds no run up. May import Kedro,
MLflow, ``datasets`` and what lies below; not ``pipelines``. Entries: the hooks that ``lm_tuning.settings`` lists, each
imported by its own module, so that none brings another's packages.
"""
