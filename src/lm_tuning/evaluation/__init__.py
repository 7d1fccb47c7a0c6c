"""Measure a model on rows it was not trained on: held-out loss, generated answers and ROUGE."""
