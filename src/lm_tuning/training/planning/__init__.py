"""The planning package."""
