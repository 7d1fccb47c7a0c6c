"""The format package."""
