"""What people type in YAML and behind ``--params``: one strict class for each group, checked together before a run.

Promises that every value has the declared type and that all problems are reported at once, without torch. May import
``errors`` and what lies below; ``loading`` alone imports Kedro. Entries: ``validate_parameters``, and the classes.
"""

from lm_tuning.parameters.data import (
    ColumnParameters,
    DataParameters,
    SourceParameters,
    SplitParameters,
    TokenizeParameters,
)
from lm_tuning.parameters.evaluate import EvaluateParameters
from lm_tuning.parameters.export import ExportParameters, ParityParameters
from lm_tuning.parameters.generate import GenerateParameters
from lm_tuning.parameters.generation import GenerationParameters
from lm_tuning.parameters.groups import (
    EnvironmentParameters,
    ModelParameters,
    Parameters,
    PreflightParameters,
    TrackingParameters,
)
from lm_tuning.parameters.predict import PredictColumns, PredictParameters
from lm_tuning.parameters.train import HealthParameters, LoraParameters, QloraParameters, TrainParameters
from lm_tuning.parameters.validation import validate_parameters

__all__ = [
    "ColumnParameters",
    "DataParameters",
    "EnvironmentParameters",
    "EvaluateParameters",
    "ExportParameters",
    "GenerateParameters",
    "GenerationParameters",
    "HealthParameters",
    "LoraParameters",
    "ModelParameters",
    "Parameters",
    "ParityParameters",
    "PredictColumns",
    "PredictParameters",
    "PreflightParameters",
    "QloraParameters",
    "SourceParameters",
    "SplitParameters",
    "TokenizeParameters",
    "TrackingParameters",
    "TrainParameters",
    "validate_parameters",
]
