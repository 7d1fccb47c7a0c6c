"""Count the classes of the rows, and say how far from even they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from lm_tuning.data.rows import open_examples
from lm_tuning.text.token_table import SPLITS

MAX_LISTED = 1000


def count_labels(
    splits: Path, split_summary: Mapping[str, Any], *, rows_by_class: Mapping[str, Mapping[str, int]] | None = None
) -> dict[str, Any] | None:
    """Count rows by class and split: by the label of labelled rows, else by the column that strata come from.

    Args:
        splits: folder of stored splits.
        split_summary: its summary.
        rows_by_class: rows with tokens by split and class, where classes are what is learned; they count then.

    Returns:
        ``column``; ``num_classes``; ``classes``: ``name`` and rows by split, the largest in train first (at most
        1,000); ``majority_fraction`` of the training rows; ``largest`` and ``smallest`` class in train;
        ``not_in_train``: classes that only held-out rows have; ``num_held_out_missing``: classes of train that neither
        validation nor test has. ``None`` for rows without classes.
    """
    tables = {split: open_examples(splits, split) for split in SPLITS}
    counts: dict[str, Counter[str]] = {}
    if rows_by_class is not None:
        column = _label_column(split_summary)
        counts = {split: Counter(rows_by_class[split]) for split in SPLITS}
    elif tables["train"].format == "text_label":
        column = _label_column(split_summary)
        for split, table in tables.items():
            counts[split] = Counter()
            for batch in table.batches():
                for item in pc.value_counts(batch.column("label")).to_pylist():
                    counts[split][item["values"]] += item["counts"]
    elif split_summary.get("classes"):
        classes = split_summary["classes"]
        column = classes["column"]
        for split in SPLITS:
            counts[split] = Counter({name: rows[split] for name, rows in classes["rows_by_split"].items()})
    else:
        return None
    names = sorted(set().union(*counts.values()), key=lambda name: (-counts["train"][name], name))
    train = counts["train"]
    present = [name for name in names if train[name]]
    return {
        "column": column,
        "num_classes": len(names),
        "num_rows": sum(train.values()),
        "classes": [{"name": name, **{split: counts[split][name] for split in SPLITS}} for name in names[:MAX_LISTED]],
        "majority_fraction": train[present[0]] / sum(train.values()) if present else 0.0,
        "largest": present[0] if present else None,
        "smallest": present[-1] if present else None,
        "not_in_train": [name for name in names if not train[name]][:MAX_LISTED],
        "num_held_out_missing": sum(not (counts["validation"][name] or counts["test"][name]) for name in present),
    }


def _label_column(split_summary: Mapping[str, Any]) -> str:
    return (split_summary.get("columns") or {}).get("label") or "label"
