"""Name the class of every row in a file with the tuned classifier."""

from .pipeline import create_pipeline

__all__ = ["create_pipeline"]
