"""What our dataset classes share: they know their catalog entry and can say which pipeline makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple, NoReturn, TypedDict, TypeVar

from kedro.io import AbstractDataset, DatasetError

from lm_tuning.errors import UserError
from lm_tuning.json_types import JsonObject


class Maker(NamedTuple):
    """Who makes a catalog entry.

    Attributes:
        node: name of the node, without its namespace.
        pipeline: the smallest named pipeline that holds it, as typed after ``--pipelines=``.
    """

    node: str
    pipeline: str


class Marks(TypedDict, total=False):
    """What an entry says to the tracking hook, under ``metadata.lm_tuning``.

    Attributes:
        mlflow_artifact: folder of the run that the files are copied to.
        mlflow_metrics: true for all numbers of the value as metrics, or the key in the value that holds them.
        also_on_failure: whether the file is copied too where a node of the run fails after writing it.
    """

    mlflow_artifact: str
    mlflow_metrics: bool | str
    also_on_failure: bool


def read_marks(dataset: object) -> Marks:
    """Return what an entry says to the tracking hook.

    Args:
        dataset: any class of dataset; only some keep the ``metadata`` of their entry.
    """
    marks: Marks | None = (getattr(dataset, "metadata", None) or {}).get("lm_tuning")
    return marks or {}


class CatalogEntry:
    """Base of our datasets.

    Their ``preview`` returns None while nothing is stored, so that kedro viz shows no preview rather than a warning.
    The annotation leaves None out, since kedro viz reads the kind of preview from it.

    Attributes:
        entry_name: the key in the catalog, set by the hook that sees the whole catalog; None without it.
    """

    entry_name: str | None = None

    @property
    def is_report(self) -> bool:
        """Whether tracking copies what is stored: a report for people, whose paths nobody opens by it."""
        return "mlflow_artifact" in read_marks(self)

    def describe_missing(self, path: Path, *, way: Sequence[str] = ()) -> str:
        """Report that nothing is stored and how to make it.

        Args:
            path: where it should lie.
            way: pipelines that lead there from what is stored; without them the one that makes this entry is named.

        Returns:
            A sentence or two that name entry, path, node and pipeline as far as they are known.
        """
        # Without a hook, as in a notebook, an entry does not know its key, and the path has to do.
        name = f"'{self.entry_name}' is not stored yet: " if self.entry_name else ""
        maker = find_maker(self.entry_name) if self.entry_name else None
        if maker is None:
            return f"{name}nothing is there at '{path}'."
        command = f"kedro run --pipelines={','.join(way) or maker.pipeline} (and the same --env and --params)"
        return f"{name}nothing is there at '{path}'. Node {maker.node} makes it: {command}"

    def require(self, path: Path, found: bool) -> None:
        """Stop a load whose source is missing.

        Args:
            path: where the source should lie.
            found: whether it is there.

        Raises:
            UserError: if it is not, naming entry, path and the pipeline that makes it.
        """
        if not found:
            raise UserError(self.describe_missing(path))


_Saved = TypeVar("_Saved")
_Loaded = TypeVar("_Loaded")


class PathDataset(CatalogEntry, AbstractDataset[_Saved, _Loaded]):
    """Base of our datasets that are a path and nothing else; subclasses say what saving and loading mean."""

    def __init__(self, filepath: str, metadata: JsonObject | None = None) -> None:
        """Keep the path.

        Args:
            filepath: file or folder; it need not exist.
            metadata: for plugins and our tracking hook.
        """
        self._filepath = Path(filepath)
        self.metadata = metadata

    def _describe(self) -> dict[str, Path]:
        return {"filepath": self._filepath}


class HandedDataset(PathDataset[NoReturn, _Loaded]):
    """Base of datasets that hand a node a path to write to; a subclass says what ``load`` returns.

    Attributes:
        who_writes: half a sentence for whoever saves to it by name.
    """

    who_writes: ClassVar[str]

    def save(self, data: NoReturn) -> NoReturn:
        """Refuse: a node writes there itself."""
        raise DatasetError(f"'{self._filepath}' {self.who_writes}.")

    def _exists(self) -> bool:
        return True  # as an input it is always there: whoever loads it makes it


def find_maker(entry_name: str) -> Maker | None:
    """Find the node and the smallest registered pipeline that output a catalog entry.

    Args:
        entry_name: key in the catalog.

    Returns:
        None when no registered pipeline makes it, or outside a Kedro project.
    """
    from kedro.framework.project import pipelines

    # Kedro makes the pipelines when they are first asked for.
    try:
        registered = dict(pipelines)
    except Exception:  # the registry is the user's code, and this is only the wording of a message
        return None
    makers = [
        (name == "__default__", len(pipeline.nodes), name, node.name.rpartition(".")[2])
        for name, pipeline in registered.items()
        for node in pipeline.nodes
        if entry_name in node.outputs
    ]
    if not makers:
        return None
    # The default pipeline last, then the fewest nodes: what is missing should cost no more than it has to.
    *_, pipeline_name, node_name = min(makers)
    return Maker(node=node_name, pipeline=pipeline_name)


def find_way(missing: Iterable[str], *, is_missing: Callable[[str], bool]) -> list[str]:
    """Name the pipelines that make what is missing, and before them those that make what they start from.

    Args:
        missing: keys in the catalog.
        is_missing: says of a key whether it should be stored and is not.

    Returns:
        Names of registered pipelines, in the order in which they run; one that is part of another is left out.
    """
    from kedro.framework.project import pipelines

    way: list[str] = []

    def add(name: str) -> None:
        maker = find_maker(name)
        if maker is None or maker.pipeline in way:
            return
        # Depth first, so that each pipeline comes after those that it starts from.
        for needed in sorted(pipelines[maker.pipeline].inputs()):
            if is_missing(needed):
                add(needed)
        way.append(maker.pipeline)

    for name in missing:
        add(name)
    # The train pipeline holds tokenize: naming both would tokenize twice.
    nodes = {name: set(pipelines[name].nodes) for name in way}
    return [name for name in way if not any(nodes[name] < nodes[other] for other in way)]
