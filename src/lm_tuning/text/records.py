"""What this package hands on: facts that are stored as JSON, a chat message as it travels, and a row of tokens.

Loads nothing heavy, so that whoever only declares these types pays for none of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NotRequired, Required, TypeAlias, TypedDict

from lm_tuning.data.records import FoundRow
from lm_tuning.json_types import JsonObject, JsonValue

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from lm_tuning.data.split.records import DividedSource
    from lm_tuning.models.record import BaseModelRecord

NO_LABEL = -1
"""Class of a row that has none."""

Span: TypeAlias = tuple[int, int]
"""Half-open token positions, from the first to the one behind the last."""

CharRange: TypeAlias = tuple[int, int]
"""Half-open positions of characters in a text."""

Rendering: TypeAlias = Literal["chat template", "plain text"]
"""What wrote the rows as text."""


class Message(TypedDict, total=False):
    """One turn of a conversation, as ``read_messages`` has brought it to its shape.

    It may hold further keys, which are handed to the chat template as they are.

    Attributes:
        role: ``system``, ``user``, ``assistant`` or ``tool``.
        content: what is said; missing where an assistant only calls tools.
        reasoning_content: what was thought before, text as a rule. ``thinking`` and ``reasoning`` are other names for
            it, which transformers takes for one another.
        tool_calls: what an assistant calls: objects with ``function``, or with its ``name`` and ``arguments``. Turns of
            others are not checked for what lies under this key.
        tool_call_id: the call that a tool answers, with ``name`` of the tool.
        weight: of an assistant's turn; 0 leaves it unlearned.
    """

    role: Required[str]
    content: str
    reasoning_content: JsonValue
    thinking: JsonValue
    reasoning: JsonValue
    tool_calls: list[JsonValue]
    tool_call_id: str
    name: str
    weight: float


Tools: TypeAlias = list[JsonObject]
"""What a conversation may call: descriptions as JSON schemas."""

Conversation: TypeAlias = tuple[list[Message], Tools | None]


class TokenSources(TypedDict):
    """Everything that tokens are made from, with ``tokenize`` parameters by name; its digest is their key."""

    schema_version: int
    tokens_version: int
    splits: str
    tokenizer: str
    tokenize: JsonObject
    task: str


class TokenManifest(TypedDict):
    """What the manifest of a folder of tokens holds as its facts."""

    sources: TokenSources
    base_model: BaseModelRecord


class LengthQuantiles(TypedDict):
    """Lengths in tokens: every quantile is one that occurs."""

    min: int
    p50: int
    p90: int
    p95: int
    p99: int
    max: int
    mean: float


class BeyondLimit(TypedDict):
    """What a limit on length cuts, and what a higher one would.

    Attributes:
        num_rows: rows that were longer.
        max_length_tokens: tokens of the longest of them; ``None`` without any.
        tokens_over_limit: tokens beyond the limit, of all of them.
        rows_over: rows that are longer than a power of two, by that power.
        tokens_over: their tokens beyond it.
    """

    num_rows: int
    max_length_tokens: int | None
    tokens_over_limit: int
    rows_over: dict[str, int]
    tokens_over: dict[str, int]


class LimitLosses(TypedDict):
    """Tokens that the limits cut out of the rows of a split, dropped rows included, and their share of all, 0 to 1."""

    num_tokens_lost: int
    fraction: float


class SplitTokens(TypedDict):
    """What became of the rows of one split: row accounting, lengths, and what is supervised.

    Attributes:
        num_rows_read: rows of the stored split.
        num_rows: rows that are left.
        num_tokens: tokens of those.
        num_supervised_tokens: tokens that carry loss; not for a classifier.
        supervised_fraction: their share of the tokens, 0 to 1; ``None`` without tokens.
        num_classes: classes that have rows; of a classifier, as are ``rows_by_class`` and ``majority_fraction``.
        rows_by_class: rows of each class, in the order of the label map.
        majority_fraction: share of the largest class, 0 to 1; ``None`` without rows.
        length_tokens: of whole rows; ``None`` without rows.
        source_tokens: of the sources, for ``seq2seq_lm``.
        target_tokens: of the targets, for ``seq2seq_lm``.
        changed: rows by what was changed in them, a key of ``CHANGED``.
        dropped: rows by why they were left out, a key of ``DROPPED``.
        too_long: rows beyond ``tokenize.max_length_tokens``.
        targets_too_long: rows beyond ``tokenize.max_target_tokens``, for ``seq2seq_lm``.
        lost_to_limits: what both limits took away; missing in tokens of the first versions.
    """

    num_rows_read: int
    num_rows: int
    num_tokens: int
    num_supervised_tokens: NotRequired[int]
    supervised_fraction: NotRequired[float | None]
    num_classes: NotRequired[int]
    rows_by_class: NotRequired[dict[str, int]]
    majority_fraction: NotRequired[float | None]
    length_tokens: LengthQuantiles | None
    source_tokens: NotRequired[LengthQuantiles | None]
    target_tokens: NotRequired[LengthQuantiles | None]
    changed: dict[str, int]
    dropped: dict[str, int]
    too_long: BeyondLimit
    lost_to_limits: NotRequired[LimitLosses]
    targets_too_long: NotRequired[BeyondLimit]


class TokenizerFacts(TypedDict):
    """The size of a vocabulary, added tokens included, and the special tokens, each ``None`` where there is none."""

    num_tokens: int
    bos_token: str | None
    eos_token: str | None
    eos_token_id: int | None
    pad_token: str | None
    pad_token_id: int | None


class TokenFacts(TypedDict):
    """What a folder of tokens says of itself.

    Attributes:
        task: the ``task`` parameter.
        format: of the rows, such as ``messages``.
        rendering: what wrote them as text.
        max_length_tokens: tokens that a row may have; for ``seq2seq_lm`` its source.
        max_target_tokens: tokens that a target may have; of ``seq2seq_lm`` alone.
        truncation: what happened to longer rows.
        cut_prompt_at: where they were cut.
        loss_on: what is supervised; of ``causal_lm`` alone, as are ``system_turn`` and ``template_arguments``.
        control_tokens: what happened to typed control tokens.
        system_turn: what the chat template got of a system turn.
        template_arguments: its further arguments.
        tokenizer: its vocabulary and special tokens.
        end_token_ids: ids that answers end in, the most frequent first.
        sources: where the training rows come from.
        splits: by name.
    """

    task: str
    format: str
    rendering: Rendering
    max_length_tokens: int
    max_target_tokens: NotRequired[int]
    truncation: str
    cut_prompt_at: str
    loss_on: NotRequired[str]
    control_tokens: str
    system_turn: NotRequired[str]
    template_arguments: NotRequired[JsonObject]
    tokenizer: TokenizerFacts
    end_token_ids: list[int]
    sources: list[DividedSource]
    splits: dict[str, SplitTokens]


class TokenSummary(TokenFacts):
    """The summary of a folder of tokens, ``summary.json``; ``label_map`` is ``None`` without classes."""

    label_map: dict[str, int] | None


class RowsOutcome(TypedDict):
    """Rows of a split that were dropped, or changed, for one reason: the first of them, and the numbers of all."""

    split: str
    kind: str
    meaning: str
    num_rows: int
    rows: list[FoundRow]
    row_numbers: dict[str, list[int]]


class TokensFacts(TokenFacts):
    """The facts of the section ``tokens`` of the data report."""

    dropped: list[RowsOutcome]
    changed: list[RowsOutcome]


class TokenPreview(TypedDict):
    """The first rows of each split as a table."""

    columns: list[str]
    data: list[list[str | int]]


@dataclass(frozen=True)
class TokenRow:
    """One tokenized row.

    Attributes:
        row_id: identity of the row, stable from split to evaluation.
        input_ids: token ids, ``(length,)``; a read-only view into the memory-mapped file.
        spans: half-open ``(start, end)`` token positions that carry loss, ascending, disjoint, never position 0.
        label: class of the whole row by the label map; ``NO_LABEL`` without one.
    """

    row_id: int
    input_ids: npt.NDArray[np.int32]
    spans: list[Span]
    label: int = NO_LABEL

    @property
    def num_supervised(self) -> int:
        """Count the positions that carry loss, and the row itself if it has a class."""
        return sum(end - start for start, end in self.spans) + (self.label != NO_LABEL)
