"""Read, check and divide the rows."""

from .pipeline import create_pipeline

__all__ = ["create_pipeline"]
