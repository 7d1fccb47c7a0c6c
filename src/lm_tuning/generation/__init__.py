"""The generation package."""
