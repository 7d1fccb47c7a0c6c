"""What tracking says about a run, as plain values, and the columns that the list of runs shows.

MLflow keeps a view that someone saves under "Views" as a tag of the experiment, for everyone who opens it. So ours is
one of those: it can be chosen in that menu, and has a link.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_tuning.json_types import JsonObject
from lm_tuning.storage.folders import MANIFEST_NAME, StagedFolder
from lm_tuning.tracking.names import distinct_names
from lm_tuning.tracking.records import RunParams

if TYPE_CHECKING:
    from mlflow import MlflowClient


#: MLflow takes 6000 characters today; servers of earlier versions stop at 500.
MAX_VALUE_CHARACTERS = 500
#: A group with more keys than this is one setting, such as a map of class labels, and not a mapping of settings.
MAX_GROUP_KEYS = 50
#: Where the full values of all settings are kept in the run.
PARAMETERS_ARTIFACT = "parameters.yml"
#: Settings that differ in every resumed run, by nature.
RESUME_SETTINGS = frozenset({"train.resume"})
#: The value of a setting that a run lacks.
NOT_SET = "not set"


def flatten_settings(parameters: JsonObject) -> dict[str, str]:
    """Turn nested parameters into one text a setting.

    Args:
        parameters: groups of settings, nested at will; lists and tuples are values.

    Returns:
        ``group.key`` to its value: text as it is, everything else as JSON. Values too long for MLflow are shortened and
        say so. Names are as MLflow takes them, each different, see ``distinct_names``.
    """
    flat: dict[str, str] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, Mapping) and 0 < len(value) <= MAX_GROUP_KEYS:
            for key, inner in value.items():
                add(f"{name}.{key}" if name else str(key), inner)
        else:
            # Text stays bare, as people compare it in a table; the rest as JSON, so that null and "null" differ.
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            flat[name] = shorten_value(text)

    for key, value in parameters.items():
        add(str(key), value)
    names = distinct_names(flat)
    return {names[name]: value for name, value in flat.items()}


def shorten_value(text: str, limit: int = MAX_VALUE_CHARACTERS) -> str:
    """Cut a text that is too long for a parameter, and say how much is missing and where all of it is.

    Args:
        text: the value.
        limit: most characters of the result.
    """
    if len(text) <= limit:
        return text
    marker = f"... [shortened: {len(text)} characters, all in {PARAMETERS_ARTIFACT}]"
    return text[: limit - len(marker)] + marker


def find_changes(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, str]:
    """Return the settings whose value differs from the one that a resumed run was started with.

    Args:
        old: settings in the run, flat.
        new: settings now, flat. One that the run does not have yet is no change, unless its group was there: a later
            version has more settings.

    Returns:
        The new value by name, ``NOT_SET`` for a setting that is gone.
    """
    groups = _groups(old)
    # A group that the run does not have came with a later version of this project, and is nobody's change.
    changed = {
        name: value
        for name, value in new.items()
        if (name in old or groups & _groups([name])) and old.get(name) != value
    }
    gone = {name: NOT_SET for name in old if name not in new and _groups([name]) & _groups(new)}
    return {name: value for name, value in (changed | gone).items() if name not in RESUME_SETTINGS}


def _groups(names: Iterable[str]) -> set[str]:
    """Return the groups within a parameter group that the names lie in, and the names that may have become one."""
    parts = [name.split(".") for name in names]
    return {".".join(each[:depth]) for each in parts for depth in range(2, len(each) + 1)}


def rerun_command(arguments: Sequence[str], run_params: RunParams) -> str:
    """Return a command line that starts the same run again.

    Args:
        arguments: ``sys.argv``. When the run was not started by ``kedro``, as in a notebook, the command is put
            together from ``run_params``.
        run_params: what Kedro gives its hooks.
    """
    program = Path(arguments[0]) if arguments else Path()
    if program.stem == "kedro" or (program.name == "__main__.py" and program.parent.name == "kedro"):
        return shlex.join(["kedro", *arguments[1:]])
    words = ["kedro", "run"]
    if run_params.get("env"):
        words.append(f"--env={run_params['env']}")
    options = {
        "pipelines": run_params.get("pipeline_names"),
        "tags": run_params.get("tags"),
        "nodes": run_params.get("node_names"),
        "from-nodes": run_params.get("from_nodes"),
        "to-nodes": run_params.get("to_nodes"),
        "from-inputs": run_params.get("from_inputs"),
        "to-outputs": run_params.get("to_outputs"),
    }
    words += [f"--{option}={','.join(values)}" for option, values in options.items() if values]
    leaves = _leaves(run_params.get("runtime_params") or {})
    settings = ",".join(f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in leaves)
    if settings:
        words.append(f"--params={settings}")
    return shlex.join(words)


def name_pipelines(run_params: RunParams) -> str:
    """Name the pipelines of a run, in one order whatever Kedro's; ``all`` for the default one.

    Args:
        run_params: what Kedro gives its hooks.
    """
    names = run_params.get("pipeline_names") or ["__default__"]
    return "+".join("all" if name == "__default__" else name for name in sorted(names))


def data_digests(entry: str, value: Any) -> dict[str, str]:
    """Return tags that tell which data an entry held.

    Args:
        entry: key in the catalog.
        value: what was saved or loaded: a dict with a ``digest``, or with such dicts, or lists of them, by split; a
            folder of a store, staged or stored, which is known by its key.

    Returns:
        ``data.<entry>`` or ``data.<entry>.<split>`` to the digest; nothing for other values.
    """
    if isinstance(value, StagedFolder):
        return {f"data.{entry}": value.key}
    if isinstance(value, Path):
        return {f"data.{entry}": value.name} if (value / MANIFEST_NAME).is_file() else {}
    if not isinstance(value, Mapping):
        return {}
    if isinstance(value.get("digest"), str):
        return {f"data.{entry}": value["digest"]}
    found = {name: _digest_of_files(inner) for name, inner in value.items()}
    return {f"data.{entry}.{name}": digest for name, digest in found.items() if digest}


def _digest_of_files(value: Any) -> str | None:
    """Return the digest of one description; of several the SHA-256 of theirs, one per line."""
    described = [value] if isinstance(value, Mapping) else value if isinstance(value, list) else []
    digests = [
        item["digest"] for item in described if isinstance(item, Mapping) and isinstance(item.get("digest"), str)
    ]
    if len(digests) < 2:
        return next(iter(digests), None)
    # As many digits as that of one file, and what sha256sum makes of its own first column.
    return hashlib.sha256("".join(f"{digest}\n" for digest in digests).encode()).hexdigest()


def numbers_of(value: Any) -> dict[str, float]:
    """Return the numbers in nested dicts by dotted name; lists, texts, booleans and NaN are left out."""
    numbers = {
        name: float(leaf)
        for name, leaf in _leaves(value)
        # True is an int to Python, and a metric of 1 would say nothing.
        if isinstance(leaf, int | float) and not isinstance(leaf, bool) and math.isfinite(leaf)
    }
    names = distinct_names(numbers)
    return {names[name]: number for name, number in numbers.items()}


def _leaves(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Return name and value of everything in nested dicts that is no dict."""
    if not isinstance(value, Mapping):
        return [(prefix, value)] if prefix else []
    return [leaf for key, inner in value.items() for leaf in _leaves(inner, f"{prefix}.{key}" if prefix else str(key))]


#: Id of our view, as it stands in its link.
VIEW = "lm-tuning"

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
    if _TAG in experiment.tags:
        return
    # As MLflow's UI reads it; columns of metrics that no run has are not shown.
    columns = [f"metrics.`{name}`" for name in _METRICS] + [f"params.`{name}`" for name in _PARAMETERS]
    state, now = json.dumps({"selectedColumns": columns}), time.time_ns() // 1_000_000
    view = {"name": "Loss, score, speed", "createdAt": now, "updatedAt": now, "state": state}
    client.set_experiment_tag(experiment.experiment_id, _TAG, json.dumps(view))


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
