"""Make a model's steps fast without changing what they compute.

Each is tried on the model itself and kept only where it gives the same. Entry: ``fast_path.prepare_fast_path``.
"""
