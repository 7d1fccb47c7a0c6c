"""What the reports say about a classifier."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lm_tuning.data.split.class_shares import name_tied
from lm_tuning.reporting.text import (
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
    base, best = result["base"], result.get("best_constant")
    said = f"The majority class of the training rows is {_name_tied(base)}"
    # A result that an earlier version stored has none.
    if best and best["accuracy"] > base["accuracy"]:
        said += (
            f"; always answering it is right for {base['accuracy']:.2%}. The best constant answer on this split is "
            f"{_name_tied(best)}, right for {best['accuracy']:.2%}"
        )
    elif best:
        said += f"; always answering it is right for {base['accuracy']:.2%}, and no other constant answer for more"
    return f"{result['split'].capitalize()} split: {rows}, {classes} in them or predicted. {said}."


def list_blocks(result: dict[str, Any]) -> list[Block]:
    """Return the tables below the figures: constant answers, every class, confusions, and the largest classes."""
    blocks = [_constant_block(result)] if "best_constant" in result else []
    blocks += [
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
    if "class_shares" in result:
        blocks.append(_share_block(result))
    return blocks


def _constant_block(result: dict[str, Any]) -> Block:
    """Put the most frequent class of the training rows beside that of the evaluated ones."""
    constants = (("training rows", result["base"]), (f"these {result['split']} rows", result["best_constant"]))
    return Block(
        "Always answering one class",
        ("Most frequent among", "Class", "Accuracy", "Macro-F1"),
        [
            (rows, _name_tied(constant), number(constant["accuracy"], 4), number(constant["macro_f1"], 4))
            for rows, constant in constants
        ],
        num_text_columns=2,
    )


def _share_block(result: dict[str, Any]) -> Block:
    """Show the largest classes of the training rows and of the evaluated ones."""
    return Block(
        f"Largest classes in train and {result['split']}",
        ("Class", "Training rows", "Share", "Rows", "Share"),
        [
            (
                _name(line["class"]),
                f"{line['num_train_rows']:,}",
                f"{line['num_train_rows'] / result['num_train_rows']:.2%}",
                f"{line['num_rows']:,}",
                f"{line['num_rows'] / result['num_rows']:.2%}",
            )
            for line in result["class_shares"]
        ],
    )


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
    return name_tied(_name(constant["class"]), constant.get("num_tied_classes", 1))


def _name(text: str) -> str:
    return shorten(on_one_line(text), NAME_CHARACTERS)
