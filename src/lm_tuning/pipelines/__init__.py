"""The pipelines: each folder holds its graph, ``pipeline.py``, and its functions, ``nodes.py``.

Promises that nodes only hand groups of parameters over, find out whether a result is stored, and let a domain package
make it. May import Kedro, ``datasets`` and what lies below; not ``hooks`` or MLflow. Entry: ``create_pipeline`` of each
folder, which ``lm_tuning.pipeline_registry`` names.
"""

from pathlib import Path

from kedro.pipeline import Node, Pipeline

# The same in all of them: the tags "torch" and "tokenizers" tell the environment hook what to set before a node; "gpu"
# and "reports" are for --tags.

#: Digests of files that were read before, which nodes share.
DIGEST_CACHE = Path("data/.cache/digests.json")


def namespaced(name: str, *nodes: Node) -> Pipeline:
    """Build a pipeline whose nodes kedro viz shows as one group.

    Args:
        name: of the group.
        nodes: what the pipeline does.
    """
    # Entries of the catalog and parameters keep their names, since these are what people type.
    return Pipeline(nodes, namespace=name, prefix_datasets_with_namespace=False)


def datasets(*names: str) -> dict[str, str]:
    """Hand entries of the catalog to the arguments of a node, or take them from its results, that are named like them.

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
    # Whole groups: Kedro makes the class of the hint out of a group, and leaves would lose their type.
    return {group: f"params:{group}" for group in groups}
