"""Profile a few steps of the training."""

from .pipeline import create_pipeline

__all__ = ["create_pipeline"]
