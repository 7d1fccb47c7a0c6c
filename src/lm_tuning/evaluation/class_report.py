"""The parts of an evaluation's report that only a classifier has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lm_tuning.data.split.class_shares import name_tied
from lm_tuning.evaluation.class_quantized import quantized_classes_section
from lm_tuning.evaluation.class_records import HardRow
from lm_tuning.evaluation.records import ClassEvaluation, ConstantFigures, MajorityFigures
from lm_tuning.reporting.document import Block, Paragraph, Section, Table
from lm_tuning.reporting.text import keep_ends, write_number, write_percent, write_share
from lm_tuning.wording import count_of, on_one_line

NAME_CHARACTERS = 60
_TEXT_CHARACTERS = 160


def class_sections(result: ClassEvaluation) -> Iterator[Section]:
    """Yield what is to be said of a classifier, the most telling first.

    Args:
        result: of an evaluation that was not skipped.
    """
    yield from _tables(result)
    if result["calibration_bins"]:
        yield _calibration(result)
    yield _coverage(result)
    if "quantized" in result:
        yield quantized_classes_section(result["quantized"])
    if result["likely_mislabelled"]:
        yield _mislabelled(result)
    if result["hardest"]:
        title = "Hardest rows, the highest loss first"
        yield Section("hardest", title, [_hard_rows(result["hardest"])])


def _calibration(result: ClassEvaluation) -> Section:
    tuned = result["tuned"]
    sure, right = tuned["mean_probability"] or 0.0, tuned["accuracy"] or 0.0
    verdict = "too sure of itself" if sure > right else "less sure than it could be"
    said = (
        f"The model gives its answers a mean probability of {sure:.4f} and is right for {right:.4f}: on the whole it "
        f"is {verdict}. Calibration error {write_number(tuned['calibration_error'], 4)}: by so much probability and "
        f"accuracy differ on average, in {len(result['calibration_bins'])} bins of equal width."
    )
    rows = [
        (
            f"{one['low']:.2f} to {one['high']:.2f}",
            one["num_rows"],
            write_number(one["mean_probability"], 4),
            write_number(one["accuracy"], 4),
        )
        for one in result["calibration_bins"]
        if one["num_rows"]
    ]
    head = ("Probability", "Rows", "Mean probability", "Accuracy")
    return Section("calibration", "Calibration", [Paragraph(said), Table("", head, rows, is_brief=False)])


def _coverage(result: ClassEvaluation) -> Section:
    blocks: list[Block] = []
    if "abstaining" in result:
        chosen = result["abstaining"]
        said = (
            f"With evaluate.abstain_below = {chosen['abstain_below']:g} the model answers "
            f"{chosen['num_answered']:,} of {count_of(result['num_rows'], 'row')} "
            f"({write_percent(chosen['answered_fraction'])}) and is right for "
            f"{write_number(chosen['accuracy'], 4)} of these."
        )
        wrong, right = chosen["wrong_rows_left_out_fraction"], chosen["right_rows_left_out_fraction"]
        if wrong is not None and right is not None:
            said += (
                f" It leaves out {write_percent(wrong)} of its mistakes, and {write_percent(right)} of what is right."
            )
        blocks.append(Paragraph(said))
    rows = [
        (
            f"{point['abstain_below']:g}",
            point["num_answered"],
            write_percent(point["answered_fraction"]),
            write_number(point["accuracy"], 4),
        )
        for point in result["coverage"]
    ]
    head = ("No answer below", "Answered rows", "Share", "Accuracy of these")
    return Section("coverage", "Where the model should not answer", [*blocks, Table("", head, rows, is_brief=False)])


def _mislabelled(result: ClassEvaluation) -> Section:
    shown, found = result["likely_mislabelled"], result.get("num_likely_mislabelled", 0)
    of_them = f" The {len(shown)} surest of them:" if len(shown) < found else ""
    said = (
        f"{count_of(found, 'row')} where the model is as sure of another class as it is of rows that have it: look "
        f"whether the label is wrong, or the text belongs to both.{of_them}"
    )
    return Section("mislabelled", "Labels that are likely wrong", [Paragraph(said), _hard_rows(shown)])


def _hard_rows(rows: Sequence[HardRow]) -> Table:
    cells = [
        (
            str(row["row_id"]),
            name_class(row["reference"]),
            f"{row['reference_probability']:.3f}",
            name_class(row["tuned"]),
            f"{row['probability']:.3f}",
            keep_ends(on_one_line(row["text"]), _TEXT_CHARACTERS),
        )
        for row in rows
    ]
    head = ("Row", "Class", "Its probability", "Predicted", "Its probability", "Text")
    return Table("", head, cells, text_columns=(0, 1, 3, 5), is_brief=False)


def _tables(result: ClassEvaluation) -> Iterator[Section]:
    """Yield the tables of a classifier: constant answers, every class, confusions, and the largest classes."""
    constants = (("training rows", result["base"]), (f"these {result['split']} rows", result["best_constant"]))
    yield _section(
        "constants",
        "Always answering one class",
        ("Most frequent among", "Class", "Accuracy", "Macro-F1"),
        [
            (rows, name_constant(one), write_number(one["accuracy"], 4), write_number(one["macro_f1"], 4))
            for rows, one in constants
        ],
        num_text_columns=2,
    )
    yield _section(
        "classes",
        "Classes, the lowest F1 first",
        ("Class", "Rows", "Predicted", "Precision", "Recall", "F1"),
        [
            (
                name_class(line["class"]),
                line["num_rows"],
                line["num_predicted"],
                *(write_number(score, 4) for score in (line["precision"], line["recall"], line["f1"])),
            )
            for line in result["per_class"]
        ],
    )
    if result["confusions"]:
        yield _section(
            "confusions",
            "Most frequent confusions",
            ("Class", "Taken for", "Rows", "Of the class"),
            [
                (
                    name_class(line["reference"]),
                    name_class(line["predicted"]),
                    line["num_rows"],
                    f"{line['fraction']:.1%}",
                )
                for line in result["confusions"]
            ],
            num_text_columns=2,
        )
    yield _section(
        "shares",
        f"Largest classes in train and {result['split']}",
        ("Class", "Training rows", "Share", "Rows", "Share"),
        [
            (
                name_class(line["class"]),
                line["num_train_rows"],
                write_share(line["num_train_rows"], result["num_train_rows"]),
                line["num_rows"],
                write_share(line["num_rows"], result["num_rows"]),
            )
            for line in result["class_shares"]
        ],
    )


def _section(
    key: str, title: str, head: Sequence[str], rows: Sequence[Sequence[str | int]], *, num_text_columns: int = 1
) -> Section:
    return Section(key, title, [Table("", head, rows, text_columns=range(num_text_columns))])


def name_constant(constant: ConstantFigures | MajorityFigures) -> str:
    """Name the class of a constant answer, and how many are as frequent.

    Args:
        constant: always answers that class.
    """
    return name_tied(name_class(str(constant["class"])), constant["num_tied_classes"] or 1)


def name_class(text: str) -> str:
    """Write the name of a class on one line, not too long.

    Args:
        text: as in the rows.
    """
    # Classes have their names from rows, of any length and with whatever is in them.
    return keep_ends(on_one_line(text), NAME_CHARACTERS)
