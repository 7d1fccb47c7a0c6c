"""Look at the rows as training will see them."""

from .pipeline import create_pipeline

__all__ = ["create_pipeline"]
