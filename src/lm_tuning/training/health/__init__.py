"""Checks before, at and after the first step: each finding has a code, what was measured and how to fix it.

A new check is a function that returns a ``records.Finding``, called beside the others of its kind; its code stands in
``lm_tuning.parameters.health_codes``.
Entries: ``report.HealthReport``, ``pre_checks``, ``first_step``, ``monitor.TrainingMonitor``.
"""
