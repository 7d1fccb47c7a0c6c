"""The kernels package."""
