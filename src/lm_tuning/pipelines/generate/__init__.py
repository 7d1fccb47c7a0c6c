"""Answer a file of prompts with the tuned model or its base."""

from .pipeline import create_pipeline

__all__ = ["create_pipeline"]
