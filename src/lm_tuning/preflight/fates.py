"""Give every row that was read exactly one fate, so that the figures add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from lm_tuning.text.store.table import SPLITS
from lm_tuning.text.tokenizers.counts import DROPPED


def account_for_rows(split_summary: Mapping[str, Any], token_summary: Mapping[str, Any]) -> dict[str, Any]:
    """Follow the rows from the files to the training.

    Args:
        split_summary: what the split pipeline says about its rows.
        token_summary: what tokenizing says about them.

    Returns:
        ``num_rows_read``, and ``fates``: for each ``stage``, ``reason`` and ``num_rows``, from the first stage that
        takes rows away to the rows that are used. The fates add up to the rows read.
    """
    files = split_summary["files"]
    num_read = sum(file["rows_read"] for file in files)
    skipped: Counter[str] = Counter()
    for file in files:
        skipped.update(file["rows_skipped"])
    fates = [_fate("skipped", kind.replace("_", " "), num_rows) for kind, num_rows in skipped.most_common()]
    for name, reason in (("duplicates", "copy of another row"), ("near_duplicates", "almost a copy of another row")):
        fates.append(_fate("left out of the splits", reason, (split_summary.get(name) or {}).get("num_dropped", 0)))
    used = []
    for split in SPLITS:
        facts = token_summary["splits"][split]
        assert facts["num_rows_read"] == split_summary["rows"][split], (
            f"{split}: {split_summary['rows'][split]} rows were split off, {facts['num_rows_read']} were tokenized"
        )
        for reason, num_rows in facts["dropped"].items():
            fates.append(_fate(f"dropped in tokenizing ({split})", DROPPED.get(reason, reason), num_rows))
        used.append(_fate("used", "trained on" if split == "train" else split, facts["num_rows"]))
    fates = [fate for fate in fates if fate["num_rows"]] + used
    total = sum(fate["num_rows"] for fate in fates)
    assert total == num_read, f"{num_read} rows were read, but their fates add up to {total}: {fates}"
    return {"num_rows_read": num_read, "fates": fates}


def _fate(stage: str, reason: str, num_rows: int) -> dict[str, Any]:
    return {"stage": stage, "reason": reason, "num_rows": int(num_rows)}
