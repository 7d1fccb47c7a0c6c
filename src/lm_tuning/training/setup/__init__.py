"""The setup package."""
