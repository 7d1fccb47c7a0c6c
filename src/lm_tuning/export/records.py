"""What an export stores: ``export.json`` in its folder, and the figures of its parity."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from lm_tuning.json_types import JsonObject

ExportDtype = Literal["float32", "bfloat16", "float16"]
MergeBase = Literal["full_precision", "dequantized"]


class DistanceRecord(TypedDict):
    """How far two models lie apart on the same predictions; a prediction is a supervised token, or a row's class."""

    num_predictions: int
    # Mean loss of a prediction, in nats, of the model that is compared with and of the one that is compared.
    reference_nats: float
    exported_nats: float
    loss_change_fraction: float
    mean_kl_nats: float
    top_1_agreement: float
    # The largest difference of a logit, in standard deviations of all logits compared.
    max_logit_difference: float


class BoundRecord(TypedDict):
    """One bound, and what was found."""

    name: str
    value: float
    bound: float
    is_met: bool


class ParityRecord(TypedDict):
    """The comparison that an export had to pass."""

    split: str
    num_rows: int
    # What the export was compared with, in words.
    reference: str
    # The weights as written, computed in float32: what the bounds are about.
    distance: DistanceRecord
    # The same where products are made in the 16 bits of the weights, as most servers do; reported only.
    distance_in_dtype: DistanceRecord | None
    bounds: list[BoundRecord]
    # Greedy answers, reported only.
    num_answers: int
    num_equal_answers: int
    # Of the process that compared them.
    dtype: str
    device: str
    seconds: float
    versions: dict[str, str]


class GgufRecord(TypedDict):
    """How a GGUF was written, and what llama.cpp made of it."""

    quantization: Literal["none", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
    # llama.cpp's name of the way in which the tokenizer splits a text.
    pre_tokenizer: str
    # Whether llama.cpp has read it; else the parity is that of the merged model that it was written from.
    is_checked: bool
    # Held-out texts of which llama.cpp made the same tokens.
    num_texts: int
    # 95 % of the change of the held-out loss as a fraction, over rows drawn again; none of fewer than two rows.
    loss_change_interval: tuple[float, float] | None


class MergeRecord(TypedDict):
    """How an adapter was merged."""

    base: MergeBase
    num_merged_layers: int
    # Whether head and embedding, which the base shares, became two matrices.
    is_untied: bool
    # Of an adapter trained over quantized weights: the distance of each base with the adapter to the model as trained.
    distance_to_trained: NotRequired[dict[MergeBase, DistanceRecord]]


class ExportRecord(TypedDict):
    """``export.json``: what was exported, of what, and how near it comes."""

    format: Literal["merged", "adapter", "gguf"]
    task: Literal["causal_lm", "sequence_classification", "seq2seq_lm"]
    method: Literal["full", "lora", "qlora"]
    dtype: ExportDtype
    num_bytes: int
    # By its name on the hub, or that of its folder without where it lies.
    base_model: str
    base_digest: str
    tokens_key: str | None
    mlflow_run_id: str | None
    merge: MergeRecord | None
    # Only of a GGUF.
    gguf: NotRequired[GgufRecord]
    # Rows of the embedding of the input.
    num_embeddings: int | None
    parity: ParityRecord
    notes: list[str]


class UploadedFile(TypedDict):
    """A file of an upload, by its path in the repository."""

    path: str
    num_bytes: int


class UploadRecord(TypedDict):
    """What was uploaded to a hub, or would be."""

    # None where no upload was asked for.
    repository: str | None
    is_dry_run: bool
    files: list[UploadedFile]
    num_bytes: int
    # Where it lies now; None where nothing was sent.
    url: str | None


class ServingSettings(TypedDict):
    """What the code that answers has to know; plain values, stored with the model in MLflow."""

    task: Literal["causal_lm", "sequence_classification", "seq2seq_lm"]
    is_adapter: bool
    # Of an adapter: its base, and how that is held.
    base: str | None
    revision: str | None
    quantization: JsonObject | None
    num_embeddings: int | None
    # Whether a request is a user's turn, which the chat template writes.
    is_chat: bool
    adds_special_tokens: bool
    # The EOS token behind a source, where the tokenizer puts none; and one that it puts and the training did not.
    append_token_id: int | None
    strip_token_id: int | None
    max_new_tokens: int
    labels: list[str]
    trust_remote_code: bool


class NotServed(TypedDict):
    """An export that MLflow does not get."""

    is_wanted: Literal[False]


class ServedModel(TypedDict):
    """An export as MLflow gets it."""

    is_wanted: Literal[True]
    folder: str
    # How MLflow loads it: its own flavour for transformers, or the code beside its dataset.
    flavor: Literal["transformers", "python"]
    # Of the transformers flavour, such as text-generation or llm/v1/chat.
    pipeline_task: str
    settings: ServingSettings
    # A request, as the model takes it.
    example: list[str] | JsonObject
    requirements: list[str]
    register_as: str | None
    alias: str | None
    tags: dict[str, str]
