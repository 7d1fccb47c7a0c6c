"""Train the base model on the tokenized examples."""

from .pipeline import create_pipeline

__all__ = ["create_pipeline"]
