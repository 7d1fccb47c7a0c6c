"""All groups of parameters in one; the small groups are declared here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from lm_tuning.parameters.base import AutoOrCount, Count, CountOrZero, Dtype, ParameterGroup, PathText, TaskName, Text
from lm_tuning.parameters.data import DataParameters, SplitParameters, TokenizeParameters
from lm_tuning.parameters.evaluate import EvaluateParameters
from lm_tuning.parameters.export import ExportParameters
from lm_tuning.parameters.generate import GenerateParameters
from lm_tuning.parameters.predict import PredictParameters
from lm_tuning.parameters.train import TrainParameters


class ModelParameters(ParameterGroup):
    """Which pretrained model is tuned, and how its weights are held."""

    name_or_path: PathText = "data/06_models/base/SmolLM2-135M-Instruct"
    """Folder in the Hugging Face layout, or a name on the model hub."""

    revision: Text | None = None
    """Branch, tag or commit on the hub; null takes the main branch. A folder has none."""

    dtype: Dtype = "auto"
    """Dtype of the weights in memory; auto chooses by device and method and says what it chose."""

    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention implementation; auto takes the fastest that the device and the installed packages have."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model: only for models whose code has been read."""


# Read by the hook before torch is imported, so nothing in here may need it.
class EnvironmentParameters(ParameterGroup):
    """Threads, matrix precision and determinism: what decides speed before the first step."""

    num_threads: AutoOrCount = "auto"
    """CPU threads of one operation; auto takes every core for training on a CPU and few beside a GPU."""

    tf32: bool = True
    """Multiply float32 matrices in TF32 on NVIDIA cards since Ampere: 10 bits of mantissa, several times faster."""

    flash_sdp: bool = True
    """Allow the flash kernel of scaled dot product attention."""

    mem_efficient_sdp: bool = True
    """Allow the memory-efficient kernel of scaled dot product attention."""

    reproducibility: Literal["fast", "deterministic"] = "fast"
    """Fast lets cuDNN try algorithms; deterministic repeats a run bit by bit on the same machine, more slowly."""

    variables: dict[str, str] = Field(default={})
    """More environment variables, name to text; a variable that is already set in the shell wins."""


class PreflightParameters(ParameterGroup):
    """What preflight shows."""

    num_examples: Count = 3
    """Rows shown as the model will see them, with the supervised part marked."""


# None of these decides a result, so a resumed run may have others.
class TrackingParameters(ParameterGroup):
    """What MLflow keeps of a run."""

    experiment: Text = "lm-tuning"
    """Name of the MLflow experiment."""

    run_name: Text | None = None
    """Name of the run; null makes one of the output name and the pipelines."""

    log_model: Literal["adapter", "always", "never"] = "adapter"
    """Whether the tuned weights are copied into MLflow: an adapter only, full weights too, or neither."""

    on_unreachable: Literal["continue", "stop"] = "continue"
    """When the tracking store does not answer at the start: go on and send later, or refuse to start."""


# Names that stand for something else where outputs lie: converted base models and batch plans in data/06_models, the
# lock of the tracking store in data/.locks; and names that Windows keeps for devices.
RESERVED_OUTPUTS = frozenset({"base", "batch_plans", "evaluation_history", "mlflow"})
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


# One by one here, and against each other by validate_parameters().
class Parameters(ParameterGroup):
    """All parameters of a run, checked one by one and against each other."""

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

    predict: PredictParameters = PredictParameters()
    """Which rows a tuned classifier names the class of."""

    generate: GenerateParameters = GenerateParameters()
    """Which prompts are answered, and how."""

    export: ExportParameters = ExportParameters()
    """What is written for use elsewhere."""

    tracking: TrackingParameters = TrackingParameters()
    """What MLflow keeps."""
