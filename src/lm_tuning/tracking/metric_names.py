"""Names that metrics get in MLflow. No other place gives them: files keep the names of their columns and keys.

MLflow's UI draws one group of charts for each text before the last slash of a name, and sorts groups by name,
capitals first. What stands before the slash is where a figure comes from: the split that was measured, or the part of
the run.
"""

from __future__ import annotations

from collections.abc import Mapping

LOSS_GROUP = "Loss"
"""Training and held-out loss once more, alone, in the group that MLflow shows first."""

_EVALUATED = "validation_"
"""How :class:`lm_tuning.training.step_log.StepLog` marks what it measured on held-out rows."""

_DATA = {"data_": "data/"}
_GROUPS = {
    "data_report": _DATA,
    "split_report": _DATA,
    "token_report": _DATA,
    "preflight": _DATA,
    "profile": {"profile.": "profile/"},
    "efficiency": {"efficiency.": "efficiency/"},
    "evaluation": {
        "base.": "base/",
        "tuned.": "{split}/tuned_",
        "improvement.": "{split}/improvement_",
        "": "{split}/",
    },
}
"""By catalog entry: how its figures' names begin, and what stands in the place of that in MLflow."""

_OF_EARLIER_VERSIONS = "gradient_norm"
"""Logged with each step of each training until names had groups."""


def has_earlier_names(stored: Mapping[str, float]) -> bool:
    """Say whether a run was begun by a version whose names had no groups; a resume goes on with those.

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
