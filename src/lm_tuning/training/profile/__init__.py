"""The profile package."""
