"""The sources package."""
