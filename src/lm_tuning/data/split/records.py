"""What the package says of a division: the summary of a folder of splits, stored as JSON, and its parts."""

from __future__ import annotations

from typing import TypedDict

from lm_tuning.data.records import FileRows, LabelMap, RowsBySplit, TextLength


class ListedRows(TypedDict):
    """How many rows there are of a kind, and the ids of the first of them, ascending, see ``list_rows``."""

    num_rows: int
    first_row_ids: list[int]


class LabelConflict(TypedDict):
    """A text with more than one label: ids of a few of its rows, and beside each its label."""

    num_rows: int
    row_ids: list[int]
    labels: list[str]


class LabelConflicts(TypedDict):
    """All texts read with more than one label, and the first of them.

    Rows in no split were left out as copies; ``num_texts_in_splits`` still have more than one label there.
    """

    num_texts: int
    num_texts_in_splits: int
    num_rows: int
    num_rows_by_split: RowsBySplit
    num_rows_left_out: int
    first: list[LabelConflict]


class CopyFacts(TypedDict):
    """What there is of copies and what became of them, see ``copy_facts``; ``conflicts`` is None without labels."""

    handling: str
    by: str
    num_copies: int
    num_dropped: int
    num_dropped_by_file: RowsBySplit
    num_kept: int
    num_label_conflicts: int
    num_shared_texts: int
    conflicts: LabelConflicts | None


class NearFacts(TypedDict):
    """Groups of near duplicates and what became of them, see ``near_facts``."""

    handling: str
    similarity: float
    num_compared: int
    num_near_copies: int
    num_units: int
    largest: ListedRows | None
    num_dropped: int
    num_cut_links: int
    num_seconds: float
    rows_per_second: int | None


class HeldOutLeakage(TypedDict):
    """Rows of one held-out split that stand in train too; ``near`` is None when nobody looked."""

    num_rows: int
    fraction: float
    exact: ListedRows
    near: ListedRows | None


class Leakage(TypedDict):
    """The same of both held-out splits together and of each, see ``measure_leakage``."""

    num_rows: int
    fraction: float
    validation: HeldOutLeakage
    test: HeldOutLeakage


class LargestGroup(TypedDict):
    """The value that most rows share."""

    value: str
    num_rows: int


class GroupFacts(TypedDict):
    """How the groups fell, see ``group_facts``; ``overlap`` counts those in two splits, by pair."""

    column: str
    num_groups: int
    largest: LargestGroup
    num_groups_by_split: RowsBySplit
    overlap: RowsBySplit


class ClassFacts(TypedDict):
    """How the strata fell, see ``class_facts``; ``only_in_train`` are those with too few rows to be divided."""

    column: str
    num_classes: int
    rows_by_split: dict[str, RowsBySplit]
    num_only_in_train: int
    only_in_train: dict[str, int]


# ``class`` is a keyword of Python, so these two cannot be written as classes.
ClassRows = TypedDict("ClassRows", {"class": str, "num_rows": int})
MovedClass = TypedDict(
    "MovedClass", {"class": str, "num_train_rows": int, "num_rows": int, "fraction_of_train": float, "fraction": float}
)


class LargestClasses(TypedDict):
    """The largest classes of a set of rows, see ``summarize_classes``."""

    num_rows: int
    num_classes: int
    num_largest: int
    largest: list[ClassRows]


class ShareFacts(TypedDict):
    """How frequent classes are in each split, and where that differs a lot, see ``share_facts``."""

    column: str
    num_classes: int
    splits: dict[str, LargestClasses]
    shown: dict[str, RowsBySplit]
    moved: dict[str, list[MovedClass]]


class UntrainedFacts(ListedRows):
    """Held-out rows of classes that the training split has not, see ``untrained_facts``."""

    column: str
    num_classes: int
    can_stratify: bool
    num_rows_by_class: dict[str, int]


class LostFacts(TypedDict):
    """Classes whose rows were all left out as copies, see ``lost_facts``."""

    column: str
    num_classes: int
    num_rows_by_class: dict[str, int]


class FoldFacts(TypedDict):
    """How large the folds are; rows of rare classes are in none of them."""

    num_folds: int
    fold: int
    num_rows_by_fold: list[int]
    num_rows_always_in_train: int


class DivisionFacts(TypedDict):
    """What a division says of itself, see ``divide_rows``.

    ``overlap`` counts the texts that each pair of splits shares; ``overlap_rows`` and ``overlap_other_labels`` have the
    pairs alone that share any.
    """

    wanted_rows: RowsBySplit
    duplicates: CopyFacts
    near_duplicates: NearFacts | None
    overlap: RowsBySplit
    overlap_rows: dict[str, dict[str, ListedRows]]
    overlap_other_labels: dict[str, RowsBySplit]
    leakage: Leakage
    groups: GroupFacts | None
    classes: ClassFacts | None
    class_shares: ShareFacts | None
    untrained_classes: UntrainedFacts | None
    lost_classes: LostFacts | None
    folds: FoldFacts | None


class DividedSource(TypedDict):
    """A training source, and how many of its rows are in train."""

    path: str
    weight: float
    num_rows: int


class ReportedSplits(DivisionFacts):
    """What the summary of a folder of splits and the section of the data report have in common."""

    rows: RowsBySplit
    seed: int
    key: str | None
    sources: list[DividedSource]
    label_map: LabelMap | None
    warnings: list[str]


class SplitsSummary(ReportedSplits):
    """The summary of a folder of splits, see ``write_splits``."""

    facts_version: int
    format: str
    columns: dict[str, str]
    template: str | None
    max_rows: int | None
    text_lengths: dict[str, TextLength] | None
    files: list[FileRows]


class SplitsFacts(ReportedSplits):
    """The facts of the section ``splits``, see ``build_splits_section``: ``copies``: row numbers by kind and file."""

    copies: dict[str, dict[str, list[int]]]
