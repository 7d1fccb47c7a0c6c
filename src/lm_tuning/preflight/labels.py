"""Count the classes of the rows, and say how far from even they are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from lm_tuning.data.records import SPLITS
from lm_tuning.data.split.class_shares import choose_shown, count_largest, list_moved, name_tied
from lm_tuning.data.split.records import SplitsSummary
from lm_tuning.data.store import open_examples
from lm_tuning.preflight.records import ClassCount, LabelFigures
from lm_tuning.reporting.document import Bars, Block, Paragraph, Table
from lm_tuning.reporting.text import write_percent
from lm_tuning.wording import count_of

MAX_LISTED = 1000
MAX_SHOWN = 30


def count_labels(
    splits: Path, split_summary: SplitsSummary, *, rows_by_class: Mapping[str, Mapping[str, int]] | None = None
) -> LabelFigures | None:
    """Count rows by class and split: by the label of labelled rows, else by the column that strata come from.

    Args:
        splits: folder of stored splits.
        split_summary: its summary.
        rows_by_class: rows with tokens by split and class, where classes are what is supervised; they count then.

    Returns:
        ``column``; ``num_classes``; ``classes``: ``name`` and rows by split, the largest in train first (at most
        1,000); ``majority_fraction`` of the training rows; ``largest`` and ``smallest`` class in train;
        ``not_in_train``: classes without a row in train; ``in_no_split``: those of them without any row, which the
        label map still has; ``num_held_out_missing``: classes that neither validation nor test has;
        ``num_largest``: equally frequent classes of train that none is larger than; ``shown``: some 30 of ``classes``,
        the largest of each split among them; ``num_rows_by_split``;
        ``best_by_split``: the largest class of each held-out split with rows: ``name``, ``num_largest`` and
        ``fraction``; ``moved``: see ``list_moved``, by held-out split. ``None`` for rows without classes.
    """
    tables = {split: open_examples(splits, split) for split in SPLITS}
    counts: dict[str, Counter[str]] = {}
    # What is supervised comes first: tokenizing may have dropped the rows that the splits still hold.
    if rows_by_class is not None:
        column = _label_column(split_summary)
        counts = {split: Counter(rows_by_class[split]) for split in SPLITS}
    elif tables["train"].format == "text_label":
        column = _label_column(split_summary)
        for split, table in tables.items():
            counts[split] = Counter()
            for batch in table.batches():
                # Counted by Arrow: a Python loop over millions of labels would take longer than all the rest.
                for item in pc.value_counts(batch.column("label")).to_pylist():
                    counts[split][item["values"]] += item["counts"]
    elif classes := split_summary["classes"]:
        column = classes["column"]
        for split in SPLITS:
            counts[split] = Counter({name: rows[split] for name, rows in classes["rows_by_split"].items()})
    else:
        return None
    # By name where rows are equal, so that the order does not hang on that of a set.
    names = sorted(set().union(*counts.values()), key=lambda name: (-counts["train"][name], name))
    train = counts["train"]
    present = [name for name in names if train[name]]
    is_held_out = {name: bool(counts["validation"][name] or counts["test"][name]) for name in names}
    # (classes,), in the order of the names
    by_split = {split: np.array([counts[split][name] for name in names], dtype=np.int64) for split in SPLITS}
    listed: list[ClassCount] = [
        {"name": name, "train": train[name], "validation": counts["validation"][name], "test": counts["test"][name]}
        for name in names
    ]
    return {
        "column": column,
        "num_classes": len(names),
        "num_rows": sum(train.values()),
        "num_rows_by_split": {split: int(rows.sum()) for split, rows in by_split.items()},
        "classes": listed[:MAX_LISTED],
        "shown": [listed[index] for index in choose_shown(list(by_split.values()), most=MAX_SHOWN)],
        "majority_fraction": train[present[0]] / sum(train.values()) if present else 0.0,
        "largest": present[0] if present else None,
        "num_largest": count_largest(by_split["train"]),
        "best_by_split": {
            split: {
                "name": names[int(rows.argmax())],
                "num_largest": count_largest(rows),
                "fraction": int(rows.max()) / int(rows.sum()),
            }
            for split, rows in by_split.items()
            if split != "train" and rows.any()
        },
        "moved": {
            split: list_moved(by_split["train"], rows, names) for split, rows in by_split.items() if split != "train"
        },
        "smallest": present[-1] if present else None,
        "not_in_train": [name for name in names if not train[name]][:MAX_LISTED],
        "in_no_split": [name for name in names if not train[name] and not is_held_out[name]][:MAX_LISTED],
        "num_held_out_missing": sum(not is_held_out[name] for name in names),
    }


def lay_out_labels(facts: LabelFigures, *, are_supervised: bool) -> Iterator[Block]:
    """Write what the report shows of the classes.

    Args:
        facts: see ``count_labels``.
        are_supervised: whether the class is what is supervised of a row.
    """
    column = facts["column"]
    if are_supervised:
        num_classes = facts["num_classes"]
        yield Paragraph(
            f"Each row has one of {num_classes:,} classes. A model that knows nothing starts at "
            # Of even odds; frequencies that are far from even make the best constant guess cheaper.
            f"a loss of about log({num_classes}) = {math.log(num_classes):.2f} nats per row."
        )
    yield Paragraph(
        f"{count_of(facts['num_classes'], 'class', 'classes')} in column {column!r}. The majority class of the "
        f"training rows is {name_tied(repr(facts['largest']), facts['num_largest'])}; always answering it would be "
        f"right for {write_percent(facts['majority_fraction'])} of them. The rarest is {facts['smallest']!r}. "
        + " ".join(
            f"The best constant answer on {split} is {name_tied(repr(best['name']), best['num_largest'])}, right for "
            f"{write_percent(best['fraction'])}."
            for split, best in facts["best_by_split"].items()
        )
    )
    classes = facts["classes"]
    # Both ends: a class with one row is as telling as the one that most rows have.
    shown = classes if len(classes) <= MAX_SHOWN else [*classes[: MAX_SHOWN // 2], *classes[-MAX_SHOWN // 2 :]]
    title = "Training rows by class"
    if len(shown) < facts["num_classes"]:
        title += f" (the {MAX_SHOWN // 2} most frequent and the {MAX_SHOWN // 2} rarest)"
    yield Bars(
        title,
        [one["name"] for one in shown],
        [one["train"] for one in shown],
        [f"{one['train']:,} ({write_percent(one['train'] / max(facts['num_rows'], 1))})" for one in shown],
    )
    of_split = {split: max(num_rows, 1) for split, num_rows in facts["num_rows_by_split"].items()}
    title = "Rows by class and split"
    if len(facts["shown"]) < facts["num_classes"]:
        title += " (the largest of each split)"
    yield Table(
        title,
        ["class", *SPLITS],
        [
            [
                one["name"],
                *(
                    f"{count:,} ({write_percent(count / of_split[split])})"
                    for split, count in zip(SPLITS, (one["train"], one["validation"], one["test"]), strict=True)
                ),
            ]
            for one in facts["shown"]
        ],
        is_brief=False,
    )


def _label_column(split_summary: SplitsSummary) -> str:
    return (split_summary.get("columns") or {}).get("label") or "label"
