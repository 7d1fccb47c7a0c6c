"""The align package."""
