"""The check package."""
