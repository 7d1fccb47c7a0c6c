"""The split package."""
