"""Find the raw files, and make the example when it is asked for."""

from .pipeline import create_pipeline

__all__ = ["create_pipeline"]
