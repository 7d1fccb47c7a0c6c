"""What an evaluation stores: ``evaluation.json``, the answers beside it, and the measurements of base models.

Numbers that lie in mappings become metrics of the run in MLflow, those in lists do not: figures by class are in lists,
since there may be hundreds of classes.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from lm_tuning.evaluation.analysis_records import AnalysisRecord
from lm_tuning.evaluation.class_records import Abstaining, CalibrationBin, CoveragePoint, HardRow, QuantizedClasses
from lm_tuning.evaluation.statistics.records import (
    EarlierRunRecord,
    GateCount,
    GateRecord,
    ScoreMetrics,
    ScoreRecord,
)
from lm_tuning.generation.answers import FinishReason


class LossRecord(TypedDict):
    """A held-out loss as the sums that it is made of, see ``HeldOutLoss``."""

    nats: float
    num_supervised: int
    num_rows: int
    unit: Literal["token", "row"]


class LossRowsRecord(TypedDict):
    """What each row adds to a loss; ``None`` for nats that are no finite number."""

    nats: list[float | None]
    num_right: list[int]


class MeasurementRecord(TypedDict):
    """What the store of base evaluations keeps of a language model: its loss, and its answer to each prompt."""

    loss: LossRecord
    answers: list[str]
    # Not there where an earlier version measured.
    finish_reasons: NotRequired[list[FinishReason]]
    log_probs: NotRequired[list[float | None]]
    rows: NotRequired[LossRowsRecord]


class ClassRowsRecord(TypedDict):
    """What the store of base evaluations keeps for a classifier: the training rows of each class, by its id."""

    class_rows: list[int]


class LanguageFigures(TypedDict):
    """What one language model reaches; ``None`` where nothing was measured, or where no finite number came out.

    Scores of a project's own stand beside these under their dotted names.
    """

    nats_per_token: float | None
    perplexity: float | None
    bits_per_byte: float | None
    token_accuracy: float | None
    rouge_l: float | None
    rouge_1: float | None
    rouge_2: float | None
    # Not there where evaluate.scores.names does not ask for them.
    rouge_l_sum: NotRequired[float | None]
    rouge_sum: NotRequired[float | None]
    bleu: NotRequired[float | None]
    chrf: NotRequired[float | None]
    exact_match: NotRequired[float | None]
    json_valid: NotRequired[float | None]
    json_schema: NotRequired[float | None]
    # What the loss is divided by.
    num_tokens: int
    num_bytes: int
    # What the means of ROUGE are over; an answer without a single word is in them as 0.
    num_generated: int
    num_empty: int
    # Answers in which evaluate.scores.answer_pattern found nothing; exact_match counts them as wrong.
    num_without_answer: NotRequired[int]


class LanguageImprovement(TypedDict):
    """What tuning changed; positive is better.

    Of every further score there is its difference, named like ``rouge_l_difference``.
    """

    nats_per_token_fraction: float | None
    perplexity_fraction: float | None
    bits_per_byte_fraction: float | None
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

    # None where evaluate.scores.names does not ask for it.
    base_rouge_l: float | None
    tuned_rouge_l: float | None
    # None where nobody knows: beam search tells no probabilities, and earlier versions noted none of this.
    base_finish_reason: FinishReason | None
    tuned_finish_reason: FinishReason | None
    base_log_prob: float | None
    tuned_log_prob: float | None


class MoreFigures(TypedDict):
    """Scores of a classifier, or of its base, that results of earlier versions lack."""

    micro_f1: float | None
    weighted_f1: float | None
    # ``None`` where there are too few classes, or evaluate.top_k says so.
    top_k_accuracy: float | None


class PartFigures(TypedDict):
    """The scores, by name, of the rows of one group, source or file; ``None`` where none of them was scored."""

    by: Literal["group", "source", "file"]
    name: str
    num_rows: int
    base: dict[str, float | None]
    tuned: dict[str, float | None]


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


class ClassFigures(MoreFigures):
    """What a classifier reaches; ``None`` where nothing was measured, or where no finite number came out."""

    accuracy: float | None
    macro_f1: float | None
    nats_per_row: float | None
    # By how much stated probabilities are off on average, and how sure the model is, see ``Calibration``.
    calibration_error: float | None
    mean_probability: float | None


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


class MajorityFigures(ConstantFigures, MoreFigures):
    """What stands in for a classifier's base: the most frequent class of the training rows, and their frequencies."""

    nats_per_row: float | None


class ClassImprovement(TypedDict):
    """What tuning changed; positive is better."""

    accuracy_difference: float | None
    macro_f1_difference: float | None
    micro_f1_difference: float | None
    weighted_f1_difference: float | None
    top_k_accuracy_difference: float | None
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
    # Of the row's own class.
    nats: float
    is_likely_mislabelled: bool


class ModelDigests(TypedDict):
    """What names the weights of both models."""

    base: str
    tuned: str


class EvaluationContext(TypedDict):
    """What every result says of the models and rows that were compared."""

    split: str | None
    tuned_method: Literal["full", "lora", "qlora"]
    # Names rows and tokenizer: figures of two keys are figures of two tests.
    tokens_key: str
    warnings: list[str]
    # Why nothing was measured. All figures are missing then.
    skipped: str | None
    # How sure the scores are; the first of them is the one of the verdict. See evaluation/conclusion.py.
    model_digests: NotRequired[ModelDigests]
    verdict: NotRequired[str]
    scores: NotRequired[list[ScoreRecord]]
    intervals: NotRequired[dict[str, ScoreMetrics]]
    earlier_run: NotRequired[EarlierRunRecord | None]
    gate: NotRequired[list[GateRecord]]
    gate_bounds: NotRequired[GateCount]


class LanguageEvaluation(EvaluationContext, AnalysisRecord):
    """``evaluation.json`` of a language model; without an analysis where nothing was measured."""

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
    # How each score is computed, by its name.
    signatures: NotRequired[dict[str, str]]
    # Why a score of the project's own is missing, by its name.
    failed_scores: NotRequired[dict[str, str]]
    # Where rows of several groups, sources or files were measured; the column of split.group.
    parts: NotRequired[list[PartFigures]]
    group_column: NotRequired[str | None]
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
    # The k of top_k_accuracy, empty where there is none; a text, since numbers become metrics.
    top_k: str
    calibration_bins: list[CalibrationBin]
    coverage: list[CoveragePoint]
    # Missing without evaluate.abstain_below.
    abstaining: NotRequired[Abstaining]
    # Missing where evaluate.quantization is none.
    quantized: NotRequired[QuantizedClasses]
    # Scores by group, source and file, as of language models.
    parts: NotRequired[list[PartFigures]]
    group_column: NotRequired[str | None]
    # Rows with the highest loss, and those whose label is probably wrong, see ``find_mislabelled``.
    hardest: list[HardRow]
    likely_mislabelled: list[HardRow]
    num_likely_mislabelled: NotRequired[int]
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
