"""The health package."""
