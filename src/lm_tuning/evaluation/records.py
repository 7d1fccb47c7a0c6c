"""What an evaluation stores: ``evaluation.json``, the answers beside it, and the measurements of base models.

Numbers that lie in mappings become metrics of the run in MLflow, those in lists do not: figures by class are in lists,
since there may be hundreds of classes.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from lm_tuning.generation.answers import FinishReason


class LossRecord(TypedDict):
    """A held-out loss as the sums that it is made of, see ``HeldOutLoss``."""

    nats: float
    num_supervised: int
    num_rows: int
    unit: Literal["token", "row"]


class MeasurementRecord(TypedDict):
    """What the store of base evaluations keeps of a language model: its loss, and its answer to each prompt."""

    loss: LossRecord
    answers: list[str]
    # Not there where an earlier version measured.
    finish_reasons: NotRequired[list[FinishReason]]
    log_probs: NotRequired[list[float | None]]


class ClassRowsRecord(TypedDict):
    """What the store of base evaluations keeps for a classifier: the training rows of each class, by its id."""

    class_rows: list[int]


class LanguageFigures(TypedDict):
    """What one language model reaches; ``None`` where nothing was measured, or where no finite number came out."""

    nats_per_token: float | None
    perplexity: float | None
    rouge_l: float | None
    rouge_1: float | None
    rouge_2: float | None
    # What the loss is divided by.
    num_tokens: int
    # What the means of ROUGE are over; an answer without a single word is in them as 0.
    num_generated: int
    num_empty: int


class LanguageImprovement(TypedDict):
    """What tuning changed; positive is better."""

    nats_per_token_fraction: float | None
    perplexity_fraction: float | None
    rouge_l_difference: float | None


class LanguageSample(TypedDict):
    """A prompt, its true answer, and what both models answered."""

    row_id: int
    prompt: str
    reference: str
    base: str
    tuned: str


class LanguageAnswer(LanguageSample):
    """A sample with the ROUGE-L of both answers, why they ended, and the logarithms of their probabilities."""

    base_rouge_l: float
    tuned_rouge_l: float
    # None where nobody knows: beam search tells no probabilities, and earlier versions noted none of this.
    base_finish_reason: FinishReason | None
    tuned_finish_reason: FinishReason | None
    base_log_prob: float | None
    tuned_log_prob: float | None


class ModelUsage(TypedDict):
    """What one model took: memory in bytes, tokens per second; ``None`` where there was nothing to do."""

    weights_bytes: int
    loss_tokens_per_second: float | None
    answer_tokens_per_second: float | None


class QuantizedEvaluation(TypedDict):
    """The tuned model with its weights in fewer bits, against itself as it was trained."""

    quantization: Literal["int8", "nf4"]
    figures: LanguageFigures
    usage: ModelUsage
    unquantized_usage: ModelUsage
    # By how much the loss rose, as a share of the one as trained; by how much ROUGE-L rose.
    nats_per_token_rise_fraction: float | None
    rouge_l_difference: float | None
    weights_bytes_fraction: float
    answer_speed_factor: float | None


class ClassFigures(TypedDict):
    """What a classifier reaches; ``None`` where nothing was measured, or where no finite number came out."""

    accuracy: float | None
    macro_f1: float | None
    nats_per_row: float | None


# Here and below: not a class statement, since "class" is a key, and keys of stored results stay.
ConstantFigures = TypedDict(
    "ConstantFigures",
    {
        "accuracy": float | None,
        "macro_f1": float | None,
        "class": str | None,
        "num_tied_classes": int | None,
    },
)
"""What always answering one class reaches, and how many classes are as frequent as it, itself included."""


class MajorityFigures(ConstantFigures):
    """What stands in for a classifier's base: the most frequent class of the training rows, and their frequencies."""

    nats_per_row: float | None


class ClassImprovement(TypedDict):
    """What tuning changed; positive is better."""

    accuracy_difference: float | None
    macro_f1_difference: float | None
    nats_per_row_fraction: float | None


ClassScores = TypedDict(
    "ClassScores",
    {
        "class": str,
        "num_rows": int,
        "num_predicted": int,
        "precision": float | None,
        "recall": float | None,
        "f1": float,
    },
)
"""How one class fares. Its precision is ``None`` if it was never predicted, its recall if no row is of it."""


class Confusion(TypedDict):
    """One class taken for another, in so many rows, which are this fraction of the reference's."""

    reference: str
    predicted: str
    num_rows: int
    fraction: float


ClassShare = TypedDict("ClassShare", {"class": str, "num_train_rows": int, "num_rows": int})
"""Rows of one class among the training rows and among the evaluated ones."""


class ClassSample(TypedDict):
    """A row with the class that it has and those that were answered; the probability is that of ``tuned``."""

    row_id: int
    text: str
    reference: str
    base: str
    tuned: str
    probability: float


class EvaluationContext(TypedDict):
    """What every result says of the models and rows that were compared."""

    split: str | None
    tuned_method: Literal["full", "lora", "qlora"]
    # Names rows and tokenizer: figures of two keys are figures of two tests.
    tokens_key: str
    warnings: list[str]
    # Why nothing was measured. All figures are missing then.
    skipped: str | None


class LanguageEvaluation(EvaluationContext):
    """``evaluation.json`` of a language model."""

    task: Literal["causal_lm", "seq2seq_lm"]
    # Rows whose loss was measured, and rows of the split: fewer are measured where evaluate.max_loss_rows says so.
    num_rows: int
    num_split_rows: int
    base: LanguageFigures
    tuned: LanguageFigures
    improvement: LanguageImprovement
    samples: list[LanguageSample]
    # Missing where nothing was measured; a text, since numbers become metrics.
    generation: NotRequired[str]
    # Why no row was answered; missing where some were.
    no_answers: NotRequired[str]
    # Missing where evaluate.quantization is none.
    quantized: NotRequired[QuantizedEvaluation]


class ClassEvaluation(EvaluationContext):
    """``evaluation.json`` of a classifier, whose base is the most frequent class."""

    task: Literal["sequence_classification"]
    num_rows: int
    num_split_rows: int
    base: MajorityFigures
    tuned: ClassFigures
    improvement: ClassImprovement
    per_class: list[ClassScores]
    confusions: list[Confusion]
    class_shares: list[ClassShare]
    samples: list[ClassSample]
    # Missing where nothing was measured.
    num_train_rows: NotRequired[int]
    best_constant: ConstantFigures


EvaluationRecord = LanguageEvaluation | ClassEvaluation
"""``evaluation.json``; its ``task`` tells which it is."""


class TrainingFacts(TypedDict):
    """What a report says of the tuned model beside its figures; a speed is ``None`` where it is unknown."""

    tuned_folder: str
    tokens_per_second: float | None
    samples_per_second: float | None
    steps_per_second: float | None
