"""The pipelines: each folder holds its graph, `pipeline.py`, and its functions, `nodes.py`."""

from pathlib import Path

#: Digests of files that were read before, which nodes share.
DIGEST_CACHE = Path("data/.cache/digests.json")
