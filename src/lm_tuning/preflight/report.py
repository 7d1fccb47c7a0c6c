"""Turn the figures into a report: what is shown, in which order and words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lm_tuning.data.format.columns import SEQ2SEQ_LM, SEQUENCE_CLASSIFICATION
from lm_tuning.data.rows_report import describe_row_limit
from lm_tuning.preflight import records
from lm_tuning.preflight.issues import read_issue
from lm_tuning.preflight.rows import lay_out_labels
from lm_tuning.preflight.steps import chosen_way
from lm_tuning.reporting.document import Block, Cell, Example, Histogram, Issues, Paragraph, Report, Section, Table
from lm_tuning.reporting.text import shorten_path, write_large, write_percent
from lm_tuning.wording import count_of

_MAX_FILES = 20

_RENDERINGS = {"chat template": "written by the chat template", "plain text": "as plain text"}

_WAYS = {
    "fixed": "every row to tokenize.max_length_tokens",
    "longest_row": "every row to the longest row",
    "random": "rows of a step as they come, to its longest",
    "padded": "rows of a step sorted by length (train.batching: padded)",
    "packed": "rows of a step end to end (train.batching: packed)",
}


# The same where source and target are padded each by itself.
_PAIR_WAYS = {
    **_WAYS,
    "fixed": "every source to tokenize.max_length_tokens, every target to tokenize.max_target_tokens",
    "longest_row": "every source to the longest, every target to the longest",
    "random": "rows of a step as they come, to its longest source and target",
}

_PARTS = {
    "row": "whole row",
    "prompt": "only read",
    "answer": "supervised",
    "source": "source (only read)",
    "target": "target (supervised)",
}
_DRAWN = {"row": "whole row", "answer": "supervised part", "source": "source", "target": "target"}


def compose_report(figures: records.PreflightFigures) -> Report:
    """Lay out the whole report.

    Args:
        figures: see ``inspect_tokens``.
    """
    schedule, lengths, padding = figures["schedule"], figures["lengths"], figures["padding"]
    has_classes = figures["task"] == SEQUENCE_CLASSIFICATION
    sections = [
        Section("concerns", "Issues", [Issues([read_issue(issue) for issue in figures["concerns"]])]),
        Section("examples", "What the model will see", list(_examples(figures))),
        Section("rows", "Row accounting", list(_rows(figures))),
        Section("splits", "Splits and copies", list(_splits(figures))),
        Section("lengths", "Lengths", list(_lengths(lengths))),
        Section("padding", "Padding", list(_padding(padding, _PAIR_WAYS if figures["task"] == SEQ2SEQ_LM else _WAYS))),
        Section("schedule", "Steps", list(_schedule(schedule))),
        Section("special_tokens", "BOS, EOS and PAD", list(_special_tokens(figures["special_tokens"]))),
    ]
    labels = figures["labels"]
    # Classes may be there without being supervised: rows divided by a column have its values.
    if labels:
        sections.insert(4, Section("labels", "Classes", list(lay_out_labels(labels, are_supervised=has_classes))))
    return Report(
        title="Preflight",
        subtitle=f"{figures['format']} rows, {_RENDERINGS[figures['rendering']]}, for {figures['model']}",
        tiles=[
            ("rows trained on", f"{lengths['num_rows']:,}"),
            ("tokens per epoch", write_large(schedule["tokens_per_epoch"])),
            ("classes", f"{labels['num_classes']:,}")
            if labels and has_classes
            else ("supervised tokens", write_percent(lengths["supervised_fraction"] or 0.0)),
            ("steps in all", f"{schedule['total_steps']:,}"),
            ("epochs", f"{schedule['epochs']:.2f}"),
            ("padding", write_percent(chosen_way(padding)["padding_fraction"])),
        ],
        sections=sections,
    )


def _examples(figures: records.Inspection) -> Iterator[Block]:
    if figures["task"] == SEQUENCE_CLASSIFICATION:
        supervised = "What is supervised is the class that stands above each, from the last token."
    elif figures["task"] == SEQ2SEQ_LM:
        supervised = "The source comes first; the target, which is supervised, is marked."
    else:
        supervised = "What is marked is supervised; the rest is only read."
    yield Paragraph(
        f"The first training rows, decoded from their tokens. {supervised} Line breaks and control tokens are shown, "
        "since a missing one is easily overlooked."
    )
    # Numbered rather than named by row id: the id is in the caption, and a heading is what one speaks of.
    for number, example in enumerate(figures["examples"], start=1):
        yield Example(
            title=f"Example {number}",
            caption=f"{shorten_path(example['file'])}, row {example['row']} (row id {example['row_id']}): "
            f"{_describe_size(example, figures['task'])}",
            parts=example["parts"],
        )


def _describe_size(example: records.DecodedRow, task: str) -> str:
    num_tokens, num_supervised = example["num_tokens"], example["num_supervised"]
    if task == SEQUENCE_CLASSIFICATION:
        return f"{count_of(num_tokens, 'token')}, class {example['label']!r} (id {example['label_id']})"
    if task == SEQ2SEQ_LM:
        return f"{count_of(num_tokens - num_supervised, 'token')} of source, {num_supervised:,} of target"
    return f"{count_of(num_tokens, 'token')}, {num_supervised:,} supervised"


def _rows(figures: records.Inspection) -> Iterator[Block]:
    facts = figures["rows"]
    total = facts["num_rows_read"]
    yield Table(
        "Rows read, by outcome",
        ["outcome", "reason", "rows", "share"],
        [
            [one["stage"], one["reason"], one["num_rows"], write_percent(one["num_rows"] / max(total, 1))]
            for one in facts["fates"]
        ],
        text_columns=(0, 1),
        total=["read", "", total, write_percent(1.0)],
    )
    files = figures["files"]
    limit = describe_row_limit(figures["max_rows"], [file["rows_in_file"] for file in files])
    if limit is not None:
        yield Paragraph(limit)
    yield Table(
        "Files",
        ["file", "read for", "rows"],
        [[shorten_path(file["path"]), file["split"], file["rows_read"]] for file in files[:_MAX_FILES]],
        text_columns=(0, 1),
        is_brief=False,
    )
    if len(files) > _MAX_FILES:
        yield Paragraph(f"and {count_of(len(files) - _MAX_FILES, 'more file')}.")


def _splits(figures: records.Inspection) -> Iterator[Block]:
    splits = figures["splits"]
    total = max(sum(splits["rows"].values()), 1)
    yield Table(
        "Rows by split",
        ["split", "rows", "share", "rows with tokens", "tokens"],
        [
            [name, rows, write_percent(rows / total), figures["num_rows"][name], figures["num_tokens"][name]]
            for name, rows in splits["rows"].items()
        ],
    )
    copies, near, leakage = splits["duplicates"], splits["near_duplicates"], splits["leakage"]
    rows: list[list[Cell]] = [
        ["rows read that repeat another", copies["num_copies"], f"split.duplicates: {copies['handling']}"],
        ["left out for it", copies["num_dropped"], ""],
    ]
    # None where rows have no label.
    conflicts = copies["conflicts"]
    if conflicts:
        texts = count_of(conflicts["num_texts"], "text")
        rows.append(["rows of a text with more than one label", conflicts["num_rows"], texts])
    if near:
        rows.append(["rows almost like another", near["num_near_copies"], f"split.near_duplicates: {near['handling']}"])
    else:
        rows.append(["rows almost like another", "not looked for", "split.near_duplicates: ignore"])
    share = f"{write_percent(leakage['fraction'])} of the held-out rows"
    rows.append(["held-out rows that stand in train too", leakage["num_rows"], share])
    yield Table("Copies", ["what", "rows", ""], rows, text_columns=(0, 2))


def _lengths(facts: records.LengthFigures) -> Iterator[Block]:
    quantiles, histogram = facts["quantiles"], facts["histogram"]
    yield Table(
        "Tokens per row",
        ["part", "min", "p50", "p90", "p95", "p99", "max", "mean"],
        [
            (
                _PARTS[part],
                *(one["min"], one["p50"], one["p90"], one["p95"], one["p99"], one["max"]),
                f"{one['mean']:,.0f}",
            )
            for part, one in quantiles.items()
        ],
    )
    # A limit far beyond the longest row would squeeze all bars into a corner, so it is drawn only within the edges.
    limit = facts["max_length_tokens"]
    yield Histogram(
        "Training rows by length",
        "tokens",
        histogram["edges"],
        {_DRAWN[name]: counts for name, counts in histogram.items() if name != "edges"},
        (limit, "tokenize.max_length_tokens") if limit <= histogram["edges"][-1] else None,
    )
    size = f"{count_of(facts['num_tokens'], 'token')} in {count_of(facts['num_rows'], 'row')}"
    if facts["supervised_fraction"] is not None:
        size += f", {write_percent(facts['supervised_fraction'])} of them supervised"
    num_at_limit = facts["num_rows_at_limit"]
    at_limit = (
        f"{count_of(num_at_limit, 'source' if 'source' in quantiles else 'row')} "
        f"({write_percent(facts['at_limit_fraction'])}) {'is' if num_at_limit == 1 else 'are'} as long as "
        f"tokenize.max_length_tokens: {limit} allows"
    )
    if "max_target_tokens" in facts:
        at_limit += (
            f", and {count_of(facts['num_targets_at_limit'], 'target')} as long as tokenize.max_target_tokens: "
            f"{facts['max_target_tokens']} allows"
        )
    yield Paragraph(f"{size}. {at_limit}.")
    yield _limits_table("max_length_tokens", facts["limits"])
    if "target_limits" in facts:
        yield _limits_table("max_target_tokens", facts["target_limits"])


def _limits_table(name: str, choices: list[records.LimitChoice]) -> Table:
    return Table(
        f"What another tokenize.{name} would cut",
        ["limit", "", "rows cut", "share", "tokens cut", "share"],
        [
            [
                choice["limit"],
                ", ".join(choice["named"]),
                choice["rows_over"],
                write_percent(choice["rows_fraction"]),
                choice["tokens_over"],
                write_percent(choice["tokens_fraction"]),
            ]
            for choice in choices
        ],
        text_columns=(1,),
    )


def _padding(facts: records.PaddingFigures, ways: Mapping[str, str]) -> Iterator[Block]:
    yield Table(
        "Share of positions that are padding",
        ["way to batch", "padding", "micro-batches per step", ""],
        [
            [
                ways[choice["name"]],
                write_percent(choice["padding_fraction"]),
                "" if choice["micro_batches_per_step"] is None else f"{choice['micro_batches_per_step']:,.1f}",
                "this run" if choice["name"] == facts["batching"] else "",
            ]
            for choice in facts["choices"]
        ],
        text_columns=(0, 3),
    )
    steps = _name_steps(facts, rows=f" ({count_of(facts['num_rows'], 'row')})")
    yield Paragraph(
        f"Split as training splits them, at {facts['micro_batch_tokens']:,} positions per micro-batch, from {steps}."
    )


def _name_steps(measured: records.MeasuredSteps, rows: str = "") -> str:
    """Name the steps that a figure is of; ``rows`` stands behind their number."""
    num_steps, of = measured["num_steps"], measured["of"]
    if measured["is_sample"]:
        return f"{num_steps:,} steps{rows} spread over the {of}"
    if num_steps == 1:
        return f"the only step{rows} of the {of}"
    return f"{'both' if num_steps == 2 else f'all {num_steps:,}'} steps{rows} of the {of}"


def _schedule(facts: records.ScheduleFigures) -> Iterator[Block]:
    if facts["effective_batch_rows"] is not None:
        batch = f"train.effective_batch_rows: {facts['effective_batch_rows']}"
    else:
        batch = f"train.effective_batch_tokens: {facts['effective_batch_tokens']}"
    whole = f"the run ({facts['epochs']:.2f} epochs)"
    yield Table(
        "The run",
        ["", "steps", "rows", "tokens"],
        [
            ["per epoch", facts["steps_per_epoch"], facts["rows_per_epoch"], facts["tokens_per_epoch"]],
            [whole, facts["total_steps"], facts["rows_of_run"], facts["tokens_of_run"]],
            ["warm-up", facts["warmup_steps_of_run"], "", ""],
        ],
    )
    rows = [
        [name, *(f"{size:,.0f}" for size in (value["min"], value["mean"], value["max"]))]
        for name, value in (
            ("rows", facts["rows_per_step"]),
            ("tokens", facts["tokens_per_step"]),
            ("supervised tokens", facts["supervised_tokens_per_step"]),
        )
        if value["max"]  # classes are supervised by row, and have no supervised tokens
    ]
    yield Table(f"A step ({batch})", ["", "least", "mean", "most"], rows)
    yield Paragraph(f"Least, mean and most are of {_name_steps(facts['steps_measured'])}.")
    # One source as often as it is there needs no table.
    if len(facts["sources"]) > 1 or any(source["weight"] != 1 for source in facts["sources"]):
        yield Table(
            "Sources",
            ["source", "weight", "rows", "rows per epoch", "tokens per epoch", "share of tokens", "each row"],
            [
                [
                    shorten_path(source["path"]),
                    f"{source['weight']:g}",
                    source["num_rows"],
                    source["rows_per_epoch"],
                    source["tokens_per_epoch"],
                    write_percent(source["tokens_per_epoch"] / max(facts["tokens_per_epoch"], 1)),
                    _times(source),
                ]
                for source in facts["sources"]
            ],
            text_columns=(0, 6),
        )


def _times(source: records.ScheduledSource) -> str:
    """Describe how often a row of the source comes up in an epoch."""
    whole, drawn = source["times_each"], source["rows_drawn"]
    always = {0: "", 1: "once", 2: "twice"}.get(whole, f"{whole} times")
    if not drawn:
        return always or "never"
    draw = f"{write_percent(drawn / source['num_rows'])} drawn again each epoch"
    return f"{always}, and {draw} once more" if always else draw


def _special_tokens(facts: records.SpecialTokenFigures) -> Iterator[Block]:
    # In the file a verdict is a grade; to a reader "note" would look like a heading of the answer.
    words = {"good": "good", "note": "mind", "bad": "bad"}
    yield Table(
        "Questions",
        ["question", "", "answer"],
        [[item["question"], words[item["verdict"]], item["answer"]] for item in facts["judgements"]],
        text_columns=(0, 1, 2),
    )
    if not facts["endings"]:
        return
    yield Table(
        "Last supervised token of a row",
        ["token", "id", "rows", "share", ""],
        [
            [
                # Quoted, since an ordinary token may be a space, a quote or a line break.
                end["token"] if end["is_control"] else repr(end["token"]),
                str(end["id"]),
                end["num_rows"],
                write_percent(end["num_rows"] / max(facts["num_rows"], 1)),
                "control token" if end["is_control"] else "ordinary token",
            ]
            for end in facts["endings"]
        ],
        text_columns=(0, 4),
    )
