"""What ``preflight.json`` holds: what each part of the checks hands on, under the keys that are stored.

Shares are from 0 to 1, lengths are in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

from lm_tuning.batching.micro_batches import Batching
from lm_tuning.data.records import FindingsByKind, RowsBySplit, SplitName
from lm_tuning.data.split import records as split_records
from lm_tuning.models.record import BaseModelRecord
from lm_tuning.reporting.document import Part
from lm_tuning.text.records import LengthQuantiles, Rendering, TokenSummary

# Some keys have the words of earlier versions, such as "fates", "concerns" and "learned" for supervised: files of all
# versions are compared with each other, by users and in MLflow, so a key that is stored keeps its name.

Verdict = Literal["good", "note", "bad"]


@dataclass(frozen=True)
class StoredRows:
    """What earlier pipelines have stored of the rows that a training would see.

    Attributes:
        tokens: folder of tokens.
        splits: folder of the splits that they were made from.
        base_model: whose tokenizer made them, see ``describe_base_model``.
        token_summary: what tokenizing says about the rows.
        split_summary: what splitting says about them.
        findings: what reading found.
    """

    tokens: Path
    splits: Path
    base_model: BaseModelRecord
    token_summary: TokenSummary
    split_summary: split_records.SplitsSummary
    findings: FindingsByKind


class StoredIssue(TypedDict):
    """An issue; ``level`` is ``stop``, ``warning`` or ``note``, and ``section`` the key of a section of the report."""

    level: str
    section: str
    text: str
    advice: str


class Outcome(TypedDict):
    """What became of some rows: the stage that took them away or uses them, and why."""

    stage: str
    reason: str
    num_rows: int


class RowAccount(TypedDict):
    """The rows that were read, and what became of them: ``fates`` add up to the rows read."""

    num_rows_read: int
    fates: list[Outcome]


class ReadFile(TypedDict):
    """A file, what its rows are for, and how many were read: after and before ``data.explode``."""

    path: str
    split: SplitName
    rows_read: int
    rows_in_file: int | None


class FoundKind(TypedDict):
    """How many rows reading found something in, and what it did with them."""

    num_rows: int
    meaning: str
    fate: str


class DivisionFigures(TypedDict):
    """What of the summary of the splits is told again."""

    rows: RowsBySplit
    duplicates: split_records.CopyFacts
    near_duplicates: split_records.NearFacts | None
    leakage: split_records.Leakage
    overlap: RowsBySplit
    groups: split_records.GroupFacts | None
    folds: split_records.FoldFacts | None
    untrained_classes: split_records.UntrainedFacts | None
    lost_classes: split_records.LostFacts | None
    class_shares: split_records.ShareFacts | None
    warnings: list[str]


class LimitChoice(TypedDict):
    """What a limit on the length would cut, see ``compare_limits``; ``named`` says why it is listed."""

    limit: int
    named: list[str]
    rows_over: int
    rows_fraction: float
    tokens_over: int
    tokens_fraction: float


class LengthFigures(TypedDict):
    """How long the training rows are, see ``measure_lengths``.

    ``quantiles`` and ``histogram`` go by the parts of a row; ``histogram`` has ``edges`` too. What is about targets is
    there for ``seq2seq_lm`` alone, and what is about supervised tokens is None for rows with classes.
    """

    num_rows: int
    num_tokens: int
    # None where classes are supervised: then every row counts once, and tokens are only read.
    num_supervised_tokens: int | None
    supervised_fraction: float | None
    num_rows_without_learned: int
    max_length_tokens: int
    num_rows_at_limit: int
    at_limit_fraction: float
    # By what was done to make rows fit; one row may count under several, so these do not add up to rows.
    num_rows_cut: dict[str, int]
    quantiles: dict[str, LengthQuantiles]
    histogram: dict[str, list[int]]
    limits: list[LimitChoice]
    # Not None but absent for other tasks, so that the JSON of a causal model does not speak of targets.
    max_target_tokens: NotRequired[int]
    num_targets_at_limit: NotRequired[int]
    target_limits: NotRequired[list[LimitChoice]]


class PaddingChoice(TypedDict):
    """A way to bring rows together: its share of padding, and its micro-batches where training knows the way."""

    name: str
    padding_fraction: float
    micro_batches_per_step: float | None


class MeasuredSteps(TypedDict):
    """How many steps were looked at, of what, and whether that has more."""

    num_steps: int
    of: Literal["run", "first epoch"]
    is_sample: bool


class PaddingFigures(MeasuredSteps):
    """The ways, what training does, and the steps that this rests on, see ``measure_padding``."""

    batching: Batching
    micro_batch_tokens: int
    # Of source and target together where there are two.
    max_length_tokens: int
    longest_row_tokens: int
    num_rows_over_budget: int
    num_rows: int
    choices: list[PaddingChoice]


class Spread(TypedDict):
    """A quantity over the steps."""

    mean: float
    min: int
    max: int


class ScheduledSource(TypedDict):
    """A training source and its share of an epoch: each row ``times_each``, and ``rows_drawn`` of them once more."""

    path: str
    weight: float
    num_rows: int
    num_tokens: int
    # num_rows * times_each + rows_drawn is rows_per_epoch.
    times_each: int
    rows_drawn: int
    rows_per_epoch: int
    tokens_per_epoch: int


class ScheduleFigures(TypedDict):
    """What the parameters of ``train`` say of steps, and what that comes to, see ``describe_schedule``."""

    effective_batch_rows: int | None
    effective_batch_tokens: int | None
    num_epochs: int | None
    max_steps: int | None
    # As given: below 1 a share of all steps; warmup_steps_of_run is what that comes to.
    warmup_steps: float
    eval_every_steps: int | None
    save_every_steps: int | None
    load_best: bool
    seed: int
    steps_per_epoch: int
    total_steps: int
    epochs: float
    rows_per_epoch: int
    tokens_per_epoch: int
    rows_of_run: int
    tokens_of_run: int
    warmup_steps_of_run: int
    rows_per_step: Spread
    tokens_per_step: Spread
    supervised_tokens_per_step: Spread
    steps_measured: MeasuredSteps
    last_step_rows: int
    last_step_tokens: int
    sources: list[ScheduledSource]


class ClassCount(TypedDict):
    """Rows of a class by split."""

    name: str
    train: int
    validation: int
    test: int


class BestConstant(TypedDict):
    """The largest class of a split, how many are as large, and its share of the rows."""

    name: str
    num_largest: int
    fraction: float


class LabelFigures(TypedDict):
    """The classes of the rows, see ``count_labels``."""

    column: str
    num_classes: int
    num_rows: int
    num_rows_by_split: RowsBySplit
    # The first thousand; num_classes counts all.
    classes: list[ClassCount]
    shown: list[ClassCount]
    majority_fraction: float
    largest: str | None
    num_largest: int
    best_by_split: dict[str, BestConstant]
    moved: dict[str, list[split_records.MovedClass]]
    smallest: str | None
    not_in_train: list[str]
    in_no_split: list[str]
    num_held_out_missing: int


class VocabularyFigures(TypedDict):
    """Token ids that the model does not embed, by split; ``num_embeddings`` is None where its config does not say."""

    num_tokens: int
    num_embeddings: int | None
    num_rows_beyond: RowsBySplit
    # Ids of the first few rows, which the data report turns into file and row.
    rows_beyond: dict[str, list[int]]
    # Tokens by id; JSON has no integer keys.
    ids_beyond: dict[str, str]


class TokenCount(TypedDict):
    """A special token, and the rows that hold it; ``token`` and ``id`` are None where the tokenizer has none."""

    token: str | None
    id: int | None
    num_rows_with: int


class PadCount(TokenCount):
    """PAD, the rows that hold it, and whether it is the EOS too."""

    is_eos: bool


class BosCount(TokenCount):
    """BOS, the rows that hold it, and where in them it stands."""

    added_by_tokenizer: bool
    num_rows_beginning_with: int
    num_rows_beginning_with_two: int
    num_rows_with_one_later: int


class Ending(TypedDict):
    """A token that supervised text ends in, and in how many rows."""

    id: int
    token: str
    num_rows: int
    is_control: bool


class SpecialTokenCounts(TypedDict):
    """How rows begin and end, see ``inspect_special_tokens``."""

    num_rows: int
    pad: PadCount
    eos: TokenCount
    bos: BosCount
    endings: list[Ending]
    num_end_learned: int
    # None for a classifier, which writes nothing and so has no end to learn.
    end_learned_fraction: float | None
    target_bos: NotRequired[BosCount]
    num_sources_ended: NotRequired[int]


class Judgement(TypedDict):
    """A question about these tokens, what was found, and whether it is well."""

    question: str
    answer: str
    verdict: Verdict


class SpecialTokenFigures(SpecialTokenCounts):
    """The counts of special tokens, and what is right or wrong with them."""

    judgements: list[Judgement]


class DecodedRow(TypedDict):
    """A row as the model sees it; ``row`` is its number in the file, from 1. Label and id are None without a class."""

    row_id: int
    file: str
    row: int
    num_tokens: int
    num_supervised: int
    parts: list[Part]
    label: str | None
    label_id: int | None


class Inspection(TypedDict):
    """All figures, one entry a section of the report or more."""

    task: str
    model: str
    device: str
    format: str
    rendering: Rendering
    # The lower one of what tokenizer and config say, None where neither says anything.
    context_tokens: int | None
    num_rows: RowsBySplit
    num_tokens: RowsBySplit
    files: list[ReadFile]
    max_rows: int | None
    rows: RowAccount
    findings: dict[str, FoundKind]
    changed: dict[str, int]
    splits: DivisionFigures
    lengths: LengthFigures
    padding: PaddingFigures
    schedule: ScheduleFigures
    labels: LabelFigures | None
    vocabulary: VocabularyFigures
    special_tokens: SpecialTokenFigures
    examples: list[DecodedRow]


class PreflightFigures(Inspection):
    """The same with what tracking takes, and with the issues, the gravest first."""

    metrics: dict[str, float]
    concerns: list[StoredIssue]
