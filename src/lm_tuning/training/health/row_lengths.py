"""Hold the lengths of stored rows against the positions of a model, before its weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_tuning.errors import UserError
from lm_tuning.text.store.table import open_split
from lm_tuning.wording import count_of

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class LongRows:
    """Rows of one split that are longer than a model has positions.

    Attributes:
        split: its name.
        key: the parameter that limits their length.
        num_long: how many they are.
        num_rows: rows of the split.
        longest_tokens: tokens of the longest; of the source or the target alone for ``seq2seq_lm``.
    """

    split: str
    key: str
    num_long: int
    num_rows: int
    longest_tokens: int

    def describe(self) -> str:
        """Say how many they are and how long the longest is."""
        part = {"tokenize.max_target_tokens": "target"}.get(self.key, "row")
        return (
            f"{self.num_long} of {count_of(self.num_rows, part)} of the {self.split} split, the longest with "
            f"{self.longest_tokens} tokens"
        )


def find_long_rows(tokens_folder: Path, limit: int, *, task: str) -> list[LongRows]:
    """Look for rows that are longer than a model has positions.

    Args:
        tokens_folder: a folder of tokenized splits.
        limit: positions of the model.
        task: ``seq2seq_lm`` looks at sources and targets apart, since encoder and decoder count their own positions.

    Returns:
        One entry for each split and limiting parameter, the training split first.
    """
    found = []
    for split in SPLITS:
        table = open_split(tokens_folder, split)
        parts = {"tokenize.max_length_tokens": table.lengths}
        if task == "seq2seq_lm":
            parts = {
                "tokenize.max_length_tokens": table.lengths - table.num_supervised,
                "tokenize.max_target_tokens": table.num_supervised,
            }
        for key, lengths in parts.items():
            num_long = int((lengths > limit).sum())
            if num_long:
                found.append(LongRows(split, key, num_long, len(table), int(lengths.max())))
    return found


def refuse_long_rows(
    tokens_folder: Path, base: dict[str, Any], *, task: str, label_map: dict[str, int] | None, limits: dict[str, Any]
) -> None:
    """Refuse rows for which a model has no positions; models that compute their positions are left to the findings.

    Args:
        tokens_folder: a folder of tokenized splits.
        base: what is tuned: ``name_or_path``, ``revision`` and ``trust_remote_code``.
        task: as for :func:`lm_tuning.models.loading.load_model`.
        label_map: likewise.
        limits: the ``tokenize`` parameters that the rows were made with, for the message; may be empty.

    Raises:
        UserError: naming parameter, value and positions for each kind of row.
    """
    from lm_tuning.models.loading import build_skeleton, check_model
    from lm_tuning.models.positions import find_positions, position_limit

    where = {name: base[name] for name in ("name_or_path", "revision", "trust_remote_code")}
    limit = position_limit(check_model(**where, task=task))
    long_rows = find_long_rows(tokens_folder, limit, task=task) if limit else []
    if not long_rows:
        return
    positions = find_positions(build_skeleton(**where, task=task, label_map=label_map))
    if positions is None or not positions.are_learned:
        return
    problems = []
    for key in dict.fromkeys(rows.key for rows in long_rows):
        value = limits.get(key.partition(".")[2])
        given = key if value is None else f"{key} = {value}"
        rows_of_key = "; ".join(rows.describe() for rows in long_rows if rows.key == key)
        problems.append(
            f"{given} lets rows be longer than the {limit} positions of {base['name_or_path']}, which has no "
            f"weights for later ones: {rows_of_key}. Set {key} to {limit} or less."
        )
    raise UserError(problems)
