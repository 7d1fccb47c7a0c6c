"""Names that MLflow takes for our settings and metrics; files keep the names of their columns and keys.

MLflow's UI draws one group of charts for each text before the last slash of a name, and sorts groups by name,
capitals first. What stands before the slash is where a figure comes from: the split that was measured, or the part of
the run.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Mapping

MAX_NAME_CHARACTERS = 250
_NUM_DIGEST_CHARACTERS = 8


def clean_name(name: str) -> str:
    """Replace what MLflow refuses in a name: everything but letters, digits and ``_ - . / :`` and blanks.

    MLflow also refuses names that are not the shortest way to write a path, such as ``a//b`` or ``a/../b``.
    """
    # As MLflow checks them, see mlflow.utils.validation: a name that it refuses would lose the figure.
    cleaned = re.sub(r"[^/\w.\- :]", "_", name)
    shortest = posixpath.normpath(cleaned)
    if shortest != cleaned or shortest == "." or shortest.startswith(("..", "/")):
        cleaned = cleaned.replace("/", "_")
        cleaned = "_" if cleaned == "." else re.sub(r"^\.\.", "__", cleaned)
    return cleaned[:MAX_NAME_CHARACTERS]


def distinct_name(name: str) -> str:
    """Return a name that MLflow takes and that no other name has: one that had to be changed ends in a digest."""
    cleaned = clean_name(name)
    return cleaned if cleaned == name else _mark(cleaned, name)


def distinct_names(names: Iterable[str]) -> dict[str, str]:
    """Return the name in MLflow for each of several names, no two alike.

    A name that MLflow takes is kept. One that has to be changed ends in a short digest of the original if another name
    of the same set comes to the same.

    Args:
        names: all different.

    Returns:
        The name in MLflow by name.
    """
    # A name is only changed where it has to be: charts and searches go by names, from one run to the next.
    cleaned = {name: clean_name(name) for name in names}
    counts = Counter(cleaned.values())
    return {
        name: short if counts[short] == 1 or short == name else _mark(short, name) for name, short in cleaned.items()
    }


def _mark(cleaned: str, name: str) -> str:
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:_NUM_DIGEST_CHARACTERS]
    return f"{cleaned[: MAX_NAME_CHARACTERS - len(digest) - 1]}-{digest}"


#: Training and held-out loss once more, alone, in the group that MLflow shows first.
LOSS_GROUP = "Loss"

#: How :class:`lm_tuning.training.step_log.StepLog` marks what it measured on held-out rows.
_EVALUATED = "validation_"

_DATA = {"data_": "data/"}
#: By catalog entry: how its figures' names begin, and what stands in the place of that in MLflow.
_GROUPS = {
    "data_report": _DATA,
    "split_report": _DATA,
    "token_report": _DATA,
    "preflight": _DATA,
    "profile": {"profile.": "profile/"},
    "efficiency": {"efficiency.": "efficiency/"},
    "prediction": {"labelled.": "prediction/", "": "prediction/"},
    "evaluation": {
        "base.": "base/",
        "tuned.": "{split}/tuned_",
        "improvement.": "{split}/improvement_",
        "intervals.": "{split}/interval_",
        "gate_bounds.": "{split}/gate_",
        "quantized.": "{split}/quantized_",
        "": "{split}/",
    },
}

#: Logged with each step of each training until names had groups.
_OF_EARLIER_VERSIONS = "gradient_norm"


def has_earlier_names(stored: Mapping[str, float]) -> bool:
    """Return whether a run was begun by a version whose names had no groups; a resume goes on with those.

    Args:
        stored: the metrics of the run so far.
    """
    return _OF_EARLIER_VERSIONS in stored


def name_step_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Name what training reports of a step or of an evaluation after it.

    Args:
        metrics: by their names in the step log, such as ``loss_nats_per_token`` or ``validation_accuracy``.
    """
    named: dict[str, float] = {}
    for name, value in metrics.items():
        split = "validation" if name.startswith(_EVALUATED) else "train"
        quantity = name.removeprefix(_EVALUATED)
        named[f"{split}/{quantity}"] = value
        if "nats_per_" in quantity:
            named[f"{LOSS_GROUP}/{split}_{quantity.removeprefix('loss_')}"] = value
    return named


def name_figures(entry: str, figures: Mapping[str, float], *, split: str | None = None) -> dict[str, float]:
    """Name the figures of a report.

    Args:
        entry: key in the catalog; the names of an entry that is not ours stay as they are.
        figures: by dotted name.
        split: the split that an evaluation was made on; without one, ``None``, nothing was measured.

    Returns:
        The figures by their new names; none of an evaluation without a split.
    """
    if entry == "evaluation" and split is None:
        return {}
    return {_name_figure(name, _GROUPS.get(entry, {}), split): value for name, value in figures.items()}


def _name_figure(name: str, groups: Mapping[str, str], split: str | None) -> str:
    for beginning, group in groups.items():
        if name.startswith(beginning):
            return group.format(split=split) + name.removeprefix(beginning)
    return name
