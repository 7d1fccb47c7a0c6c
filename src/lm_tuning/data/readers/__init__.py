"""The readers package."""
