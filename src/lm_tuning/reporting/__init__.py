"""The reporting package."""
