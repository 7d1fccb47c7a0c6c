"""Write the tuned model for use elsewhere, prove that it is the same model, and pass it on."""

from .pipeline import create_pipeline

__all__ = ["create_pipeline"]
