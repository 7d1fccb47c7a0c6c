"""What is known of a base model and of a tuned one, as both are stored and as everything that loads them reads it."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from lm_tuning.json_types import JsonObject


class ModelLocation(TypedDict):
    """Where a model comes from: the keywords of everything that loads a part of it."""

    name_or_path: str
    revision: str | None
    trust_remote_code: bool


class BaseModelRecord(ModelLocation):
    """A base model pinned down: its location, and the digests that results are keyed by."""

    digest: str
    tokenizer_digest: str
    is_embedded: bool


class LoadingOptions(TypedDict):
    """How weights are held and used: further keywords of everything that loads them."""

    dtype: str
    attention: str
    device: str


class QuantizationRecord(TypedDict):
    """How the frozen weights of a base are held, by the names of ``train.qlora``."""

    bits: Literal[4, 8]
    quant_type: NotRequired[Literal["nf4", "fp4"]]
    double_quant: NotRequired[bool]


class RenderingRecord(TypedDict, total=False):
    """How training rows were written; what is about a chat template is missing where none wrote them."""

    template_arguments: JsonObject
    system_turn: str
    # Missing in models of earlier versions.
    format: str
    control_tokens: str


class TuningRecord(TypedDict):
    """``tuning.json``: how a tuned model was made. What earlier versions did not note may be missing."""

    method: Literal["full", "lora", "qlora"]
    task: Literal["causal_lm", "sequence_classification", "seq2seq_lm"]
    quantization: QuantizationRecord | None
    base: BaseModelRecord
    tokens_key: NotRequired[str]
    rendering: RenderingRecord
    compute_dtype: NotRequired[str]
    finished_step: int
    tokens_per_second: NotRequired[float | None]
    samples_per_second: NotRequired[float | None]
    steps_per_second: NotRequired[float | None]
    run_folder: NotRequired[str]
    mlflow_run_id: NotRequired[str | None]
    # The tokens that its generation settings stop at. A model with this key was stored with settings of its own, so the
    # evaluation takes those; one without has the settings of its base.
    stop_token_ids: NotRequired[list[int] | None]


def location_of(record: ModelLocation) -> ModelLocation:
    """Return the location alone.

    Args:
        record: a record of a model.
    """
    return ModelLocation(
        name_or_path=record["name_or_path"], revision=record["revision"], trust_remote_code=record["trust_remote_code"]
    )
