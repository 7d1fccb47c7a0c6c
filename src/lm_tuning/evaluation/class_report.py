"""What the reports say about a classifier."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lm_tuning.data.class_shares import name_tied
from lm_tuning.evaluation.report_text import (
    PROMPT_CHARACTERS,
    Block,
    Line,
    compare,
    number,
    shorten,
)
from lm_tuning.wording import count_of, escape_markdown, fence, on_one_line

HEADINGS = ("Majority class", "Tuned")
NAME_CHARACTERS = 60


def list_figures(result: dict[str, Any]) -> list[Line]:
    """Choose and format the figures that the reports show.

    Args:
        result: what ``evaluate_models`` gives as ``result``.
    """
    return [
        compare(result, "accuracy", "Accuracy (0 to 1)", as_difference=True),
        compare(result, "macro_f1", "Macro-F1 (0 to 1)", as_difference=True),
        compare(result, "nats_per_row", "Held-out loss (nats per row)"),
    ]


def describe_rows(result: dict[str, Any]) -> str:
    """Say in a sentence or two what was measured on what."""
    num_rows, num_split_rows = result["num_rows"], result["num_split_rows"]
    rows = count_of(num_split_rows, "row") if num_rows == num_split_rows else f"{num_rows:,} of {num_split_rows:,} rows"
    classes = count_of(len(result["per_class"]), "class", "classes")
    base, best = result["base"], result["best_constant"]
    said = f"The majority class of the training rows is {_name_tied(base)}"
    if best["accuracy"] > base["accuracy"]:
        said += (
            f"; always answering it is right for {base['accuracy']:.2%}. The best constant answer on this split is "
            f"{_name_tied(best)}, right for {best['accuracy']:.2%}"
        )
    else:
        said += f"; always answering it is right for {base['accuracy']:.2%}, and no other constant answer for more"
    return f"{result['split'].capitalize()} split: {rows}, {classes} in them or predicted. {said}."


def list_blocks(result: dict[str, Any]) -> list[Block]:
    """Return the tables below the figures: constant answers, every class, confusions, and the largest classes."""
    base, best = result["base"], result["best_constant"]
    blocks = [
        Block(
            "Always answering one class",
            ("Most frequent among", "Class", "Accuracy", "Macro-F1"),
            [
                (rows, _name_tied(constant), number(constant["accuracy"], 4), number(constant["macro_f1"], 4))
                for rows, constant in (("training rows", base), (f"these {result['split']} rows", best))
            ],
            num_text_columns=2,
        ),
        Block(
            "Classes, the lowest F1 first",
            ("Class", "Rows", "Predicted", "Precision", "Recall", "F1"),
            [
                (
                    _name(line["class"]),
                    f"{line['num_rows']:,}",
                    f"{line['num_predicted']:,}",
                    number(line["precision"], 4),
                    number(line["recall"], 4),
                    number(line["f1"], 4),
                )
                for line in result["per_class"]
            ],
        ),
    ]
    if result["confusions"]:
        blocks.append(
            Block(
                "Most frequent confusions",
                ("Class", "Taken for", "Rows", "Of the class"),
                [
                    (
                        _name(line["reference"]),
                        _name(line["predicted"]),
                        f"{line['num_rows']:,}",
                        f"{line['fraction']:.1%}",
                    )
                    for line in result["confusions"]
                ],
                num_text_columns=2,
            )
        )
    num_train_rows = result["num_train_rows"]
    blocks.append(
        Block(
            f"Largest classes in train and {result['split']}",
            ("Class", "Training rows", "Share", "Rows", "Share"),
            [
                (
                    _name(line["class"]),
                    f"{line['num_train_rows']:,}",
                    f"{line['num_train_rows'] / num_train_rows:.2%}",
                    f"{line['num_rows']:,}",
                    f"{line['num_rows'] / result['num_rows']:.2%}",
                )
                for line in result["class_shares"]
            ],
        )
    )
    return blocks


def write_samples(result: dict[str, Any]) -> Iterator[str]:
    """Write the samples as Markdown, line by line."""
    for sample in result["samples"]:
        text = shorten(sample["text"], PROMPT_CHARACTERS)
        yield from (
            f"### Row {sample['row_id']}: {escape_markdown(_verdict(sample))}",
            "",
            fence(text) if text else "*(empty)*",
            "",
        )


def list_samples(result: dict[str, Any]) -> Iterator[list[tuple[str, str]]]:
    """Return each sample as titled lines for the terminal."""
    for sample in result["samples"]:
        yield [("Text", on_one_line(sample["text"])), ("Class", _verdict(sample))]


def _verdict(sample: dict[str, Any]) -> str:
    reference, tuned, probability = _name(sample["reference"]), _name(sample["tuned"]), sample["probability"]
    if reference == tuned:
        return f"{reference}, rightly (probability {probability:.2f})"
    return f"{reference}, taken for {tuned} (probability {probability:.2f})"


def _name_tied(constant: dict[str, Any]) -> str:
    return name_tied(_name(constant["class"]), constant["num_tied_classes"])


def _name(text: str) -> str:
    return shorten(on_one_line(text), NAME_CHARACTERS)
