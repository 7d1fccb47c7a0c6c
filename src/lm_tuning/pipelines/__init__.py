"""The pipelines: each folder holds its graph, `pipeline.py`, and its functions, `nodes.py`."""

from pathlib import Path

#: Digests of files that were read before, which nodes share.
DIGEST_CACHE = Path("data/.cache/digests.json")


def datasets(*names: str) -> dict[str, str]:
    """Hand entries of the catalog to the arguments of a node that are named like them.

    Args:
        names: keys in the catalog.
    """
    # By name, not by position: a node with a dozen inputs would mix two of them up unseen.
    return {name: name for name in names}


def params(*groups: str) -> dict[str, str]:
    """Hand groups of parameters to the arguments of a node that are named like them.

    Args:
        groups: top-level keys of the parameters.
    """
    return {group: f"params:{group}" for group in groups}
