"""Sum up what tokenizing did to the rows: in figures, in a picture of lengths, and in a section of the data report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from lm_tuning.data.check.findings import RowPositions
from lm_tuning.data.format.columns import CAUSAL_LM, SEQ2SEQ_LM, SEQUENCE_CLASSIFICATION
from lm_tuning.data.split.class_shares import choose_shown
from lm_tuning.reporting import document as doc
from lm_tuning.reporting.markdown import write_section
from lm_tuning.text.records import LengthQuantiles, RowsOutcome, SplitTokens, TokensFacts, TokenSummary
from lm_tuning.text.store.table import Int32Array, TokenTable, open_split
from lm_tuning.text.tokenizers.counts import CHANGED, DROPPED, NUM_DETAILS, SplitCounts
from lm_tuning.text.tokenizers.refusals import measure_losses
from lm_tuning.wording import count_of, noun_for, shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_QUANTILES = (0.0, 0.5, 0.9, 0.95, 0.99, 1.0)
LENGTHS_NAME = "lengths.png"


def summarize_split(
    table: TokenTable, counts: SplitCounts, *, task: str = CAUSAL_LM, label_map: Mapping[str, int] | None = None
) -> SplitTokens:
    """Sum up one split.

    Args:
        table: its tokens.
        counts: what happened to its rows.
        task: the ``task`` parameter.
        label_map: id by name of the classes, for ``sequence_classification``.

    Returns:
        Row and token counts, quantiles of the length in tokens, rows changed and dropped by reason, how many rows were
        too long and by how much, and ``lost_to_limits``, see ``measure_losses``. For rows with classes the rows of each
        class (``rows_by_class``) and the share of the largest (``majority_fraction``); for others the supervised tokens
        and their share. For rows of source and target the quantiles of both, and the same about targets that were too
        long.
    """
    num_tokens = int(table.lengths.sum(dtype=np.int64))
    facts: SplitTokens = {
        "num_rows_read": counts.num_read,
        "num_rows": len(table),
        "num_tokens": num_tokens,
        "length_tokens": length_quantiles(table.lengths),
        "changed": {reason: counts.counts[reason] for reason in CHANGED if counts.counts[reason]},
        "dropped": {reason: counts.counts[reason] for reason in DROPPED if counts.counts[reason]},
        "too_long": counts.long_rows.describe(),
        "lost_to_limits": measure_losses(table, counts, task=task),
    }
    if task == SEQUENCE_CLASSIFICATION:
        rows = np.bincount(table.labels, minlength=len(label_map or {}))  # (classes,)
        facts["num_classes"] = int((rows > 0).sum())
        facts["rows_by_class"] = {name: int(rows[label]) for name, label in (label_map or {}).items()}
        facts["majority_fraction"] = int(rows.max()) / len(table) if len(table) else None
        return facts
    facts["num_supervised_tokens"] = int(table.num_supervised.sum(dtype=np.int64))
    facts["supervised_fraction"] = facts["num_supervised_tokens"] / num_tokens if num_tokens else None
    if task == SEQ2SEQ_LM:
        facts["source_tokens"] = length_quantiles(table.lengths - table.num_supervised)
        facts["target_tokens"] = length_quantiles(table.num_supervised)
        facts["targets_too_long"] = counts.long_targets.describe()
    return facts


def length_quantiles(lengths: Int32Array) -> LengthQuantiles | None:
    """Return quantiles and mean of lengths in tokens.

    Args:
        lengths: ``(rows,)``.

    Returns:
        By name; every quantile is a length that occurs. ``None`` without rows.
    """
    if not len(lengths):
        return None
    values = map(int, np.quantile(lengths, _QUANTILES, method="higher"))
    low, p50, p90, p95, p99, high = values
    return {"min": low, "p50": p50, "p90": p90, "p95": p95, "p99": p99, "max": high, "mean": float(lengths.mean())}


def describe_tokens(summary: TokenSummary) -> str:
    """Describe in a line what a summary holds, for the log.

    Args:
        summary: as ``write_tokens`` returns it.
    """
    splits = summary["splits"]
    rows = ", ".join(f"{facts['num_rows']:,} {name}" for name, facts in splits.items())
    train = splits["train"]
    noun = noun_for(list(splits.values())[-1]["num_rows"], "row")
    line = f"{rows} {noun}; train {count_of(train['num_tokens'], 'token')}"
    per_row = _describe_lengths(train["length_tokens"], unit=" per row")
    if summary["task"] == SEQUENCE_CLASSIFICATION:
        largest = f"the largest has {train['majority_fraction']:.1%} of the training rows"
        line += f", {per_row}; {count_of(train['num_classes'], 'class')}, {largest}"
    elif summary["task"] == SEQ2SEQ_LM:
        line += f"; sources of {_describe_lengths(train['source_tokens'])}"
        line += f"; targets of {_describe_lengths(train['target_tokens'])}"
    else:
        line += f", {train['supervised_fraction']:.0%} of them supervised, {per_row}"
    dropped = sum(sum(facts["dropped"].values()) for facts in splits.values())
    return f"{line}; {count_of(dropped, 'row')} dropped" if dropped else line


def _describe_lengths(lengths: LengthQuantiles | None, *, unit: str = "") -> str:
    assert lengths is not None, "tokens without a training row are refused"
    return f"{lengths['p50']}{unit} at the median, {lengths['max']} at most"


def draw_lengths(
    folder: Path, *, max_length_tokens: int, max_target_tokens: int | None = None, task: str = CAUSAL_LM
) -> Figure:
    """Draw how long the training rows are, and how much of them is supervised.

    Args:
        folder: tokenized splits.
        max_length_tokens: the limit, drawn as a line where rows come near it.
        max_target_tokens: the limit of targets, likewise, for ``seq2seq_lm``.
        task: the ``task`` parameter: it says which parts rows have.
    """
    from matplotlib.figure import Figure

    table = open_split(folder, "train")
    parts = {"whole row": table.lengths, "supervised part": table.num_supervised}
    limits = {"max_length_tokens": max_length_tokens}
    if task == SEQUENCE_CLASSIFICATION:
        parts = {"whole row": table.lengths}
    elif task == SEQ2SEQ_LM:
        parts = {"source": table.lengths - table.num_supervised, "target": table.num_supervised}
        limits |= {"max_target_tokens": max_target_tokens} if max_target_tokens else {}
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    longest = max(int(lengths.max(initial=1)) for lengths in parts.values())
    bins = np.linspace(0, longest + 1, min(60, longest + 1) + 1).tolist()
    for name, lengths in parts.items():
        axes.hist(lengths, bins=bins, label=name, alpha=0.6)
    for (name, limit), style in zip(limits.items(), ("--", ":"), strict=False):
        if longest > limit // 2:
            axes.axvline(limit, color="black", linestyle=style, linewidth=1, label=name)
    axes.set_xlabel("tokens")
    axes.set_ylabel("training rows")
    axes.legend(loc="upper right")
    return figure


REPORT_NAME = "report.json"

_NUM_ROWS_SHOWN = 20
_MAX_CLASSES = 30
_MAX_DETAIL_CHARACTERS = 160


def build_tokens_section(
    summary: TokenSummary, counts: Mapping[str, SplitCounts], positions: RowPositions
) -> doc.ReportSection[TokensFacts]:
    """Describe the tokens of all splits.

    Args:
        summary: as ``write_tokens`` stores it.
        counts: what happened to the rows, by split.
        positions: where rows stand in their files.

    Returns:
        The section; every dropped or changed row is named in its facts.
    """
    dropped = _outcomes(counts, DROPPED, positions)
    changed = _outcomes(counts, CHANGED, positions)
    # The names of all classes are in the summary; here they would hide what the section is about.
    told = {key: value for key, value in summary.items() if key != "label_map"}
    facts = cast("TokensFacts", {**told, "dropped": dropped, "changed": changed})
    metrics = {
        f"data_{split}_{name}": value
        for split, part in summary["splits"].items()
        for name, value in _numbers_of(part).items()
        if value is not None
    }
    metrics["data_rows_dropped_by_tokenizing"] = sum(outcome["num_rows"] for outcome in dropped)
    # A row may be changed in more than one way.
    metrics["data_rows_changed_by_tokenizing"] = sum(
        len(set(chain.from_iterable(of_split.rows(reason) for reason in CHANGED))) for of_split in counts.values()
    )
    section = doc.Section("tokens", "Tokens", list(_blocks(summary, dropped, changed)))
    return {"facts": facts, "metrics": metrics, "markdown": write_section(section) + "\n"}


def _numbers_of(part: SplitTokens) -> dict[str, float | None]:
    return {
        "rows": part["num_rows"],
        "tokens": part["num_tokens"],
        "supervised_tokens": part.get("num_supervised_tokens"),
        "supervised_fraction": part.get("supervised_fraction"),
        "majority_fraction": part.get("majority_fraction"),
    }


def _outcomes(
    counts: Mapping[str, SplitCounts], reasons: Mapping[str, str], positions: RowPositions
) -> list[RowsOutcome]:
    """Return one entry per split and reason that has rows."""
    outcomes: list[RowsOutcome] = []
    for split, of_split in counts.items():
        for reason, meaning in reasons.items():
            rows = of_split.rows(reason)
            if not rows:
                continue
            named = [(*positions.find(row_id), of_split.detail(reason, row_id)) for row_id in rows[:NUM_DETAILS]]
            outcomes.append(
                {
                    "split": split,
                    "kind": reason,
                    "meaning": meaning,
                    "num_rows": len(rows),
                    "rows": [{"file": file, "row": row, "reason": detail or meaning} for file, row, detail in named],
                    "row_numbers": dict(positions.by_file(rows)),
                }
            )
    return outcomes


def _blocks(summary: TokenSummary, dropped: list[RowsOutcome], changed: list[RowsOutcome]) -> Iterator[doc.Block]:
    tokenizer = summary["tokenizer"]
    tokens = {"BOS": tokenizer["bos_token"], "EOS": tokenizer["eos_token"], "PAD": tokenizer["pad_token"]}
    special: list[doc.Words] = []
    for name, token in tokens.items():
        special += [", " * bool(special), *([f"{name} ", doc.Code(token)] if token else [f"no {name}"])]
    how = ("Rows of format ", doc.Code(summary["format"]), f" as {summary['rendering']}; ", *_describe_limits(summary))
    yield doc.Paragraph((*how, ". Special tokens: ", *special, "."))
    yield _split_table(summary)
    if summary["task"] == SEQUENCE_CLASSIFICATION:
        yield from _class_blocks(summary, summary["label_map"] or {})
    if summary["sources"]:
        yield doc.Table(
            "",
            ("source", "weight", "training rows before tokenizing"),
            [
                (shorten(source["path"], _MAX_DETAIL_CHARACTERS), f"{source['weight']:g}", source["num_rows"])
                for source in summary["sources"]
            ],
        )
    for title, outcomes in (("Rows left out", dropped), ("Rows changed", changed)):
        yield doc.Heading(title)
        yield doc.Items([_describe_outcome(outcome) for outcome in outcomes]) if outcomes else doc.Paragraph("None.")


def _describe_limits(summary: TokenSummary) -> tuple[doc.Words, ...]:
    """Describe how long rows may be and what is supervised of them."""
    limit = f"at most {count_of(summary['max_length_tokens'], 'token')}"
    cut = (" (", doc.Code(summary["truncation"]), ")")
    if summary["task"] == SEQUENCE_CLASSIFICATION:
        classes = count_of(len(summary["label_map"] or ()), "class")
        return f"{limit} per row", *cut, f", each with one of {classes} to learn"
    if summary["task"] == SEQ2SEQ_LM:
        return f"{limit} per source and {summary['max_target_tokens']:,} per target", *cut, ", loss on the target"
    return f"{limit} per row", *cut, ", loss on ", doc.Code(summary["loss_on"])


def _split_table(summary: TokenSummary) -> doc.Table:
    """Write what each split holds: rows and tokens, what is supervised, and how long rows are."""
    columns, measured = ["supervised"], ["length"]
    if summary["task"] == SEQUENCE_CLASSIFICATION:
        columns = ["classes", "largest class"]
    elif summary["task"] == SEQ2SEQ_LM:
        columns, measured = [], ["source", "target"]
    head = ["split", "rows read", "rows kept", "tokens", *columns]
    for title in measured:
        head += [f"{title} p50", "p90", "p99", "longest"]
    rows: list[list[doc.Cell]] = []
    for split, part in summary["splits"].items():
        cells: list[doc.Cell] = [split, part["num_rows_read"], part["num_rows"], part["num_tokens"]]
        lengths = [part["length_tokens"]]
        if summary["task"] == SEQUENCE_CLASSIFICATION:
            cells += [part["num_classes"], _share(part["majority_fraction"])]
        elif summary["task"] == SEQ2SEQ_LM:
            lengths = [part["source_tokens"], part["target_tokens"]]
        else:
            cells.append(_share(part["supervised_fraction"]))
        for one in lengths:
            cells += [one["p50"], one["p90"], one["p99"], one["max"]] if one else [0, 0, 0, 0]
        rows.append(cells)
    return doc.Table("", head, rows)


def _class_blocks(summary: TokenSummary, label_map: dict[str, int]) -> Iterator[doc.Block]:
    """Write how many rows of each class the splits hold: the largest of each split, those of train first."""
    rows = {split: part["rows_by_class"] for split, part in summary["splits"].items()}
    # By name where rows are equal, so that the same tokens give the same report.
    names = sorted(label_map, key=lambda name: (-rows["train"][name], name))
    # (classes,) for each split
    counts = [np.array([of_split[name] for name in names], dtype=np.int64) for of_split in rows.values()]
    shown = [names[position] for position in choose_shown(counts, most=_MAX_CLASSES)]
    yield doc.Table(
        "",
        ("class", "id", *rows),
        [
            (shorten(name, _MAX_DETAIL_CHARACTERS), label_map[name], *(of_split[name] for of_split in rows.values()))
            for name in shown
        ],
    )
    if len(names) > _MAX_CLASSES:
        hidden = len(names) - _MAX_CLASSES
        yield doc.Paragraph(f"Classes that are not shown here, but in the JSON report: {hidden:,}.")


def _share(fraction: float | None) -> str:
    """Return a share as percent; nothing for what cannot be said of no rows."""
    return "" if fraction is None else f"{fraction:.1%}"


def _describe_outcome(outcome: RowsOutcome) -> doc.Item:
    rows = [
        f"{row['file']}, row {row['row']}"
        # The reason is the meaning itself unless there is more to say of this row.
        + (f": {shorten(row['reason'], _MAX_DETAIL_CHARACTERS)}" if row["reason"] != outcome["meaning"] else "")
        for row in outcome["rows"][:_NUM_ROWS_SHOWN]
    ]
    more = outcome["num_rows"] - _NUM_ROWS_SHOWN
    return doc.Item(
        f"{outcome['num_rows']:,} in {outcome['split']}: {outcome['meaning']}.",
        [*rows, *([f"and {more:,} more"] if more > 0 else [])],
    )
