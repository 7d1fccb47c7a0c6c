"""Turn the figures into a report: what is shown, in which order and words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from lm_tuning.preflight.document import Bars, Block, Concerns, Example, Histogram, Paragraph, Report, Section, Table

MAX_CLASSES = 30
_MAX_FILES = 20

_RENDERINGS = {"chat template": "written by the chat template", "plain text": "as plain text"}

_WAYS = {
    "fixed": "every row to tokenize.max_length_tokens",
    "longest_row": "every row to the longest row",
    "random": "rows of a step as they come, to its longest",
    "padded": "rows of a step sorted by length (train.batching: padded)",
    "packed": "rows of a step end to end (train.batching: packed)",
}


def compose_report(figures: Mapping[str, Any]) -> Report:
    """Lay out the whole report.

    Args:
        figures: see ``inspect_tokens``.
    """
    schedule, lengths, padding = figures["schedule"], figures["lengths"], figures["padding"]
    sections = [
        Section("concerns", "What to mind", list(_concerns(figures))),
        Section("examples", "What the model will see", list(_examples(figures))),
        Section("rows", "What becomes of each row", list(_rows(figures))),
        Section("splits", "Splits and copies", list(_splits(figures))),
        Section("lengths", "Lengths", list(_lengths(lengths))),
        Section("padding", "Padding", list(_padding(padding))),
        Section("schedule", "Steps", list(_schedule(schedule))),
        Section("special_tokens", "Tokens that begin, end and fill", list(_special_tokens(figures["special_tokens"]))),
    ]
    if figures["labels"]:
        sections.insert(4, Section("labels", "Classes", list(_labels(figures["labels"]))))
    return Report(
        title="Preflight",
        subtitle=f"{figures['format']} rows, {_RENDERINGS[figures['rendering']]}, for {figures['model']}",
        tiles=[
            ("rows trained on", _count(lengths["num_rows"])),
            ("tokens an epoch", _large(schedule["tokens_per_epoch"])),
            ("learned tokens", _percent(lengths["supervised_fraction"])),
            ("steps in all", _count(schedule["total_steps"])),
            ("epochs", f"{schedule['epochs']:.2f}"),
            ("padding", _percent(_fraction_of(padding, padding["batching"]))),
        ],
        sections=sections,
    )


def _concerns(figures: Mapping[str, Any]) -> Iterator[Block]:
    if figures["concerns"]:
        yield Concerns(figures["concerns"])
    else:
        yield Paragraph("Nothing stands out.")


def _examples(figures: Mapping[str, Any]) -> Iterator[Block]:
    yield Paragraph(
        "The first training rows, decoded from their tokens. What is marked is learned; the rest is only read. Line "
        "breaks and control tokens are shown, since a missing one is easily overlooked."
    )
    for number, example in enumerate(figures["examples"], start=1):
        yield Example(
            title=f"Example {number}",
            caption=f"{_short_path(example['file'])}, row {example['row']:,} (row id {example['row_id']}): "
            f"{example['num_tokens']:,} tokens, {example['num_supervised']:,} learned",
            parts=example["parts"],
        )


def _rows(figures: Mapping[str, Any]) -> Iterator[Block]:
    facts = figures["rows"]
    total = facts["num_rows_read"]
    yield Table(
        "Rows by fate",
        ["fate", "reason", "rows", "share"],
        [
            [fate["stage"], fate["reason"], _count(fate["num_rows"]), _percent(fate["num_rows"] / max(total, 1))]
            for fate in facts["fates"]
        ],
        text_columns=(0, 1),
        total=["read", "", _count(total), _percent(1.0)],
    )
    files = figures["files"]
    yield Table(
        "Files",
        ["file", "read for", "rows"],
        [[_short_path(file["path"]), file["split"], _count(file["rows_read"])] for file in files[:_MAX_FILES]],
        text_columns=(0, 1),
        is_brief=False,
    )
    if len(files) > _MAX_FILES:
        yield Paragraph(f"and {len(files) - _MAX_FILES:,} more files.")


def _splits(figures: Mapping[str, Any]) -> Iterator[Block]:
    splits = figures["splits"]
    total = max(sum(splits["rows"].values()), 1)
    yield Table(
        "Rows by split",
        ["split", "rows", "share", "rows with tokens", "tokens"],
        [
            [
                name,
                _count(rows),
                _percent(rows / total),
                _count(figures["num_rows"][name]),
                _count(figures["num_tokens"][name]),
            ]
            for name, rows in splits["rows"].items()
        ],
    )
    copies, near, leakage = splits["duplicates"], splits["near_duplicates"], splits["leakage"]
    rows = [
        ["rows that repeat another", _count(copies["num_copies"]), f"split.duplicates: {copies['handling']}"],
        ["the same text under another label", _count(copies["num_label_conflicts"]), ""],
    ]
    if near:
        rows.append(
            ["rows almost like another", _count(near["num_near_copies"]), f"split.near_duplicates: {near['handling']}"]
        )
    else:
        rows.append(["rows almost like another", "not looked for", "split.near_duplicates: ignore"])
    share = f"{_percent(leakage['fraction'])} of the held-out rows"
    rows.append(["held-out rows that stand in train too", _count(leakage["num_rows"]), share])
    yield Table("Copies", ["what", "rows", ""], rows, text_columns=(0, 2))


def _lengths(facts: Mapping[str, Any]) -> Iterator[Block]:
    names = list(facts["quantiles"]["row"])
    titles = {"row": "whole row", "prompt": "only read", "answer": "learned"}
    yield Table(
        "Tokens a row",
        ["part", *names],
        [[title, *(f"{facts['quantiles'][part][name]:,.0f}" for name in names)] for part, title in titles.items()],
    )
    histogram = facts["histogram"]
    limit = facts["max_length_tokens"]
    yield Histogram(
        "Training rows by length",
        "tokens",
        histogram["edges"],
        {"whole row": histogram["row"], "learned part": histogram["answer"]},
        (limit, "tokenize.max_length_tokens") if limit <= histogram["edges"][-1] else None,
    )
    yield Paragraph(
        f"{_count(facts['num_tokens'])} tokens in {_count(facts['num_rows'])} rows, "
        f"{_percent(facts['supervised_fraction'])} of them learned. {_count(facts['num_rows_at_limit'])} rows "
        f"({_percent(facts['at_limit_fraction'])}) are as long as tokenize.max_length_tokens: {limit} allows."
    )
    yield Table(
        "What another tokenize.max_length_tokens would cut",
        ["limit", "", "rows cut", "share", "tokens cut", "share"],
        [
            [
                _count(choice["limit"]),
                ", ".join(choice["named"]),
                _count(choice["rows_over"]),
                _percent(choice["rows_fraction"]),
                _count(choice["tokens_over"]),
                _percent(choice["tokens_fraction"]),
            ]
            for choice in facts["limits"]
        ],
        text_columns=(1,),
    )


def _padding(facts: Mapping[str, Any]) -> Iterator[Block]:
    yield Table(
        "Share of positions that are padding",
        ["way to batch", "padding", "micro-batches a step", ""],
        [
            [
                _WAYS[choice["name"]],
                _percent(choice["padding_fraction"]),
                "" if choice["micro_batches_per_step"] is None else f"{choice['micro_batches_per_step']:,.1f}",
                "this run" if choice["name"] == facts["batching"] else "",
            ]
            for choice in facts["choices"]
        ],
        text_columns=(0, 3),
    )
    basis = f"{_count(facts['num_steps'])} steps ({_count(facts['num_rows'])} rows)"
    yield Paragraph(
        f"Cut as training cuts them, at {_count(facts['micro_batch_tokens'])} positions a micro-batch, from "
        + (f"{basis} spread over the {facts['of']}." if facts["is_sample"] else f"all {basis} of the {facts['of']}.")
    )


def _schedule(facts: Mapping[str, Any]) -> Iterator[Block]:
    if facts["effective_batch_rows"] is not None:
        batch = f"train.effective_batch_rows: {facts['effective_batch_rows']}"
    else:
        batch = f"train.effective_batch_tokens: {facts['effective_batch_tokens']}"
    yield Table(
        "The run",
        ["", "steps", "rows", "tokens"],
        [
            [
                "an epoch",
                _count(facts["steps_per_epoch"]),
                _count(facts["rows_per_epoch"]),
                _count(facts["tokens_per_epoch"]),
            ],
            [
                f"the run ({facts['epochs']:.2f} epochs)",
                _count(facts["total_steps"]),
                _count(facts["rows_of_run"]),
                _count(facts["tokens_of_run"]),
            ],
            ["warm-up", _count(facts["warmup_steps_of_run"]), "", ""],
        ],
    )
    rows = [
        [name, *(f"{value[part]:,.0f}" for part in ("min", "mean", "max"))]
        for name, value in (
            ("rows", facts["rows_per_step"]),
            ("tokens", facts["tokens_per_step"]),
            ("learned tokens", facts["supervised_tokens_per_step"]),
        )
    ]
    yield Table(f"A step ({batch})", ["", "least", "mean", "most"], rows)
    if len(facts["sources"]) > 1 or any(source["weight"] != 1 for source in facts["sources"]):
        yield Table(
            "Sources",
            ["source", "weight", "rows", "rows an epoch", "tokens an epoch", "share of tokens", "each row"],
            [
                [
                    _short_path(source["path"]),
                    f"{source['weight']:g}",
                    _count(source["num_rows"]),
                    _count(source["rows_per_epoch"]),
                    _count(source["tokens_per_epoch"]),
                    _percent(source["tokens_per_epoch"] / max(facts["tokens_per_epoch"], 1)),
                    _times(source),
                ]
                for source in facts["sources"]
            ],
            text_columns=(0, 6),
        )


def _times(source: Mapping[str, Any]) -> str:
    """Say how often a row of the source comes up in an epoch."""
    whole, drawn = source["times_each"], source["rows_drawn"]
    always = {0: "", 1: "once", 2: "twice"}.get(whole, f"{whole} times")
    if not drawn:
        return always or "never"
    draw = f"{_percent(drawn / source['num_rows'])} drawn anew each epoch"
    return f"{always}, and {draw} once more" if always else draw


def _labels(facts: Mapping[str, Any]) -> Iterator[Block]:
    column = facts["column"]
    yield Paragraph(
        f"{_count(facts['num_classes'])} classes in column {column!r}. Always answering the most frequent one, "
        f"{facts['largest']!r}, would be right for {_percent(facts['majority_fraction'])} of the training rows; the "
        f"rarest is {facts['smallest']!r}."
    )
    classes = facts["classes"]
    shown = classes if len(classes) <= MAX_CLASSES else [*classes[: MAX_CLASSES // 2], *classes[-MAX_CLASSES // 2 :]]
    title = "Training rows by class"
    if len(shown) < facts["num_classes"]:
        title += f" (the {MAX_CLASSES // 2} most frequent and the {MAX_CLASSES // 2} rarest)"
    yield Bars(
        title,
        [one["name"] for one in shown],
        [one["train"] for one in shown],
        [f"{one['train']:,} ({_percent(one['train'] / max(facts['num_rows'], 1))})" for one in shown],
    )
    yield Table(
        "Rows by class and split",
        ["class", "train", "validation", "test"],
        [[one["name"], *(_count(one[split]) for split in ("train", "validation", "test"))] for one in shown],
        is_brief=False,
    )


def _special_tokens(facts: Mapping[str, Any]) -> Iterator[Block]:
    words = {"good": "good", "note": "mind", "bad": "bad"}
    yield Table(
        "Questions",
        ["question", "", "answer"],
        [[item["question"], words[item["verdict"]], item["answer"]] for item in facts["judgements"]],
        text_columns=(0, 1, 2),
    )
    yield Table(
        "Last learned token of a row",
        ["token", "id", "rows", "share", ""],
        [
            [
                end["token"] if end["is_control"] else repr(end["token"]),
                str(end["id"]),
                _count(end["num_rows"]),
                _percent(end["num_rows"] / max(facts["num_rows"], 1)),
                "control token" if end["is_control"] else "ordinary token",
            ]
            for end in facts["endings"]
        ],
        text_columns=(0, 4),
    )


def _fraction_of(padding: Mapping[str, Any], name: str) -> float:
    return next(float(one["padding_fraction"]) for one in padding["choices"] if one["name"] == name)


def _count(number: int) -> str:
    return f"{number:,}"


def _large(number: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:,.0f}"


def _percent(fraction: float) -> str:
    """Write a share so that little is not taken for nothing, nor almost all for all."""
    if 0 < fraction < 0.0005:
        return "< 0.1%"
    if 0.9995 <= fraction < 1:
        return "> 99.9%"
    return f"{fraction:.1%}"


def _short_path(path: str) -> str:
    parts = PurePath(path).parts
    return path if len(parts) <= 4 else "/".join(("…", *parts[-3:]))
