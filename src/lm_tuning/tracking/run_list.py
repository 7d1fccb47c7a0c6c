"""The columns that the list of runs shows in MLflow's UI, which shows no metric by itself.

MLflow keeps a view that someone saves under "Views" as a tag of the experiment, for everyone who opens it. So ours is
one of those: it can be chosen in that menu, and has a link.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient

VIEW = "lm-tuning"
"""Id of our view, as it stands in its link."""

VIEW_NAME = "Loss, score, speed"

_TAG = f"mlflow.sharedViewState.{VIEW}"
_METRICS = (
    "Loss/train_nats_per_token",
    "Loss/train_nats_per_row",
    "Loss/validation_nats_per_token",
    "Loss/validation_nats_per_row",
    "efficiency/tokens_per_second",
    *(
        f"{split}/tuned_{score}"
        for split in ("test", "validation")
        for score in ("nats_per_token", "nats_per_row", "rouge_l", "accuracy", "macro_f1")
    ),
)
_PARAMETERS = ("model.name_or_path", "train.method", "train.learning_rate")


def offer_view(client: MlflowClient, experiment_id: str) -> None:
    """Save the view in an experiment, unless it is there: nobody's changes to it are undone.

    Args:
        client: of the store.
        experiment_id: of the experiment.
    """
    experiment = client.get_experiment(experiment_id)
    if _TAG not in experiment.tags:
        client.set_experiment_tag(experiment.experiment_id, _TAG, describe_view(time.time_ns() // 1_000_000))


def describe_view(milliseconds: int) -> str:
    """Return the view as MLflow's UI reads it; columns of metrics that no run has are not shown.

    Args:
        milliseconds: when it was made, since 1970.
    """
    columns = [f"metrics.`{name}`" for name in _METRICS] + [f"params.`{name}`" for name in _PARAMETERS]
    state = json.dumps({"selectedColumns": columns})
    return json.dumps({"name": VIEW_NAME, "createdAt": milliseconds, "updatedAt": milliseconds, "state": state})


def find_link(address: str) -> str | None:
    """Return the address of the view in the UI; of several experiments the one that was used last.

    Args:
        address: of the UI.
    """
    from mlflow import MlflowClient

    experiments = MlflowClient().search_experiments(order_by=["last_update_time DESC"])
    found = next((each.experiment_id for each in experiments if _TAG in each.tags), None)
    # The UI opens on its part for prompts and traces unless it is told otherwise.
    query = f"viewStateShareKey={VIEW}&workflowType=machine_learning"
    return None if found is None else f"{address}/#/experiments/{found}/runs?{query}"
