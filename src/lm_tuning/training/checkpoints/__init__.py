"""The checkpoints package."""
