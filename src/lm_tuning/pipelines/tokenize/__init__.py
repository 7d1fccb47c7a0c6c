"""Turn the rows into tokens for the base model."""

from .pipeline import create_pipeline

__all__ = ["create_pipeline"]
