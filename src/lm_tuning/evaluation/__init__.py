"""Measure a model on rows that it was not trained on: held-out loss, answers, ROUGE and scores of classes.

Promises that base and tuned model are measured alike. May import ``generation`` and what lies below, not ``training``.
Entry: ``results.evaluate_models``.
"""
