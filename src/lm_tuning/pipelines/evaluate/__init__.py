"""Compare the tuned model with its base on held-out rows."""

from .pipeline import create_pipeline

__all__ = ["create_pipeline"]
