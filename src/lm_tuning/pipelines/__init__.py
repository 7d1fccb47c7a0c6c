"""The pipelines: each folder holds its graph, `pipeline.py`, and its functions, `nodes.py`."""
