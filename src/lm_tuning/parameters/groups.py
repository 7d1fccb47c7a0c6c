"""All groups of parameters in one, checked one by one."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from lm_tuning.parameters.base import CountOrZero, ParameterGroup, TaskName
from lm_tuning.parameters.data import DataParameters, SplitParameters
from lm_tuning.parameters.model import EnvironmentParameters, ModelParameters
from lm_tuning.parameters.results import EvaluateParameters, PreflightParameters, TrackingParameters
from lm_tuning.parameters.text import TokenizeParameters
from lm_tuning.parameters.train import TrainParameters

# Names that stand for something else where outputs lie: converted base models and batch plans in data/06_models, the
# lock of the tracking store in data/.locks; and names that Windows keeps for devices.
RESERVED_OUTPUTS = frozenset({"base", "batch_plans", "mlflow"})
_DEVICES = frozenset(
    {"con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(10))}
)


def _refuse_reserved(name: str) -> str:
    if name.lower() in RESERVED_OUTPUTS:
        raise ValueError(
            "the project keeps something of its own under that name (as it does under "
            f"{', '.join(sorted(RESERVED_OUTPUTS))}): take another name"
        )
    if name.lower().partition(".")[0] in _DEVICES:
        raise ValueError(
            "Windows keeps that name for a device, so the folder could not be made there: take another name"
        )
    # "a." and "a" would be two outputs here and one folder there.
    if name.endswith("."):
        raise ValueError("it ends in a dot, which Windows drops from a folder's name: take another name")
    return name


# One path component: it names folders in data/, and nothing outside may be reached through it.
OutputName = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=100,
        json_schema_extra={
            "x-words": "a folder name of letters, digits, '.', '_' and '-', the first a letter or digit"
        },
    ),
    AfterValidator(_refuse_reserved),
]


# Apart from the root class, since the checks of groups against each other read this one and the root calls them.
class ParameterGroups(ParameterGroup):
    """All parameters of a run, checked one by one."""

    seed: Annotated[CountOrZero, Field(lt=2**32)] = 42
    """Start of every random choice: split, order of rows, adapter weights, dropout."""

    output: OutputName = "default"
    """Name of the folders that results go to; runs with different names never overwrite each other."""

    task: TaskName = "causal_lm"
    """What the model learns: causal_lm predicts the next token, sequence_classification the class of a text, and
    seq2seq_lm the target of a source with an encoder-decoder."""

    model: ModelParameters = ModelParameters()
    """Which pretrained model is tuned."""

    environment: EnvironmentParameters = EnvironmentParameters()
    """Threads, matrix precision and determinism."""

    data: DataParameters = DataParameters()
    """Which rows are read."""

    split: SplitParameters = SplitParameters()
    """How rows are divided."""

    tokenize: TokenizeParameters = TokenizeParameters()
    """How rows become tokens."""

    preflight: PreflightParameters = PreflightParameters()
    """What preflight shows."""

    train: TrainParameters = TrainParameters()
    """What is trained, and for how long."""

    evaluate: EvaluateParameters = EvaluateParameters()
    """What is measured afterwards."""

    tracking: TrackingParameters = TrackingParameters()
    """What MLflow keeps."""
