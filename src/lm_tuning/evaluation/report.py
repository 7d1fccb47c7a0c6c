"""Say what an evaluation found: the figures of both models, tables, samples, and where to go on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from lm_tuning.data.format.conventions import SEQ2SEQ_LM, SEQUENCE_CLASSIFICATION
from lm_tuning.data.split.class_shares import name_tied
from lm_tuning.findings import Issue
from lm_tuning.reporting.document import (
    Block,
    Code,
    Issues,
    Item,
    Items,
    Paragraph,
    Preformatted,
    Report,
    Sample,
    Section,
    Table,
)
from lm_tuning.reporting.text import keep_ends, write_difference, write_fall, write_number, write_share
from lm_tuning.wording import count_of, on_one_line, write_speed

MLFLOW_COMMAND = "make mlflow"

_TEXT_CHARACTERS = 400
_NAME_CHARACTERS = 60
_ADAPTERS = {"lora": "LoRA adapter", "qlora": "QLoRA adapter"}


def compose_report(
    result: dict[str, Any], *, tuned_folder: str, tokens_per_second: float | None, **speeds: float | None
) -> Report:
    """Lay out the whole report.

    Args:
        result: what ``evaluate_models`` gives as ``result``.
        tuned_folder: where the tuned model lies.
        tokens_per_second: training speed; ``None`` when unknown.
        **speeds: ``samples_per_second`` and ``steps_per_second``, of the same time.
    """
    closing = _closing(result, tuned_folder, tokens_per_second=tokens_per_second, **speeds)
    if result["skipped"]:
        return Report("Evaluation", f"Skipped. {result['skipped']}", closing=closing)
    warnings = [Issue("warn", "evaluation", warning) for warning in result["warnings"]]
    has_classes = result["task"] == SEQUENCE_CLASSIFICATION
    base = "Majority class" if has_classes else "Base"
    sections = list(_class_sections(result)) if has_classes else []
    if result["samples"]:
        samples = _class_samples(result) if has_classes else _language_samples(result)
        sections.append(Section("samples", "Samples", list(samples)))
    return Report(
        "Evaluation",
        summary=[
            *([Issues(warnings)] if warnings else []),
            Paragraph(_describe_rows(result)),
            Table("", ("", base, "Tuned", "Change"), _figures(result)),
        ],
        sections=sections,
        closing=closing,
    )


def describe_outcome(result: dict[str, Any]) -> str:
    """Describe the outcome in one line for the log.

    Args:
        result: what ``evaluate_models`` gives as ``result``.
    """
    if result["skipped"]:
        return f"Evaluation skipped. {result['skipped']}"
    changes = [f"{name} {base} -> {tuned} ({change})" for name, base, tuned, change in _figures(result)]
    return f"{_describe_rows(result)} {'; '.join(changes)}."


def _closing(result: dict[str, Any], tuned_folder: str, **speeds: float | None) -> list[Block]:
    known = {name.removesuffix("_per_second"): speed for name, speed in speeds.items() if speed is not None}
    said = ", ".join(f"{write_speed(speed)} {unit} per second" for unit, speed in known.items())
    items = [
        *([Item(f"Training speed: {said}")] if said else []),
        Item((f"{_ADAPTERS.get(result['tuned_method'], 'Tuned weights')}: ", Code(tuned_folder))),
        Item(("All runs in the MLflow UI: ", Code(MLFLOW_COMMAND))),
    ]
    return [Items(items)]


def _figures(result: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return the figures that are shown: name with unit, value of both models, and the change."""
    if result["task"] == SEQUENCE_CLASSIFICATION:
        return [
            _compare(result, "accuracy", "Accuracy (0 to 1)", as_difference=True),
            _compare(result, "macro_f1", "Macro-F1 (0 to 1)", as_difference=True),
            _compare(result, "nats_per_row", "Held-out loss (nats per row)"),
        ]
    return [
        _compare(result, "nats_per_token", "Held-out loss (nats per token)"),
        _compare(result, "perplexity", "Perplexity", decimals=2),
        _compare(result, "rouge_l", "ROUGE-L (0 to 1)", as_difference=True),
    ]


def _compare(
    result: dict[str, Any], key: str, name: str, *, decimals: int = 4, as_difference: bool = False
) -> tuple[str, str, str, str]:
    # What is between 0 and 1 is compared by difference: a share of a score near 0 says nothing.
    improvement = result["improvement"]
    change = (
        write_difference(improvement[f"{key}_difference"])
        if as_difference
        else write_fall(improvement[f"{key}_fraction"])
    )
    return name, write_number(result["base"][key], decimals), write_number(result["tuned"][key], decimals), change


def _describe_rows(result: dict[str, Any]) -> str:
    """Describe in a sentence or two what was measured on what."""
    measured = _describe_classes(result) if result["task"] == SEQUENCE_CLASSIFICATION else _describe_answers(result)
    return f"{result['split'].capitalize()} split: {measured}."


def _describe_answers(result: dict[str, Any]) -> str:
    base, tuned = result["base"], result["tuned"]
    token = "target token" if result["task"] == SEQ2SEQ_LM else "supervised token"
    said = f"{count_of(result['num_rows'], 'row')}, {count_of(base['num_tokens'], token)}"
    if base["num_generated"]:
        said += f", {count_of(base['num_generated'], 'answer')} of each model"
        if result.get("generation", "greedy") != "greedy":
            said += f" by {result['generation']}"
        if base["num_empty"] or tuned["num_empty"]:
            said += f" ({base['num_empty']:,} empty from base, {tuned['num_empty']:,} from tuned)"
    return said


def _describe_classes(result: dict[str, Any]) -> str:
    num_rows, num_split_rows = result["num_rows"], result["num_split_rows"]
    rows = count_of(num_split_rows, "row") if num_rows == num_split_rows else f"{num_rows:,} of {num_split_rows:,} rows"
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
    return f"{rows}, {count_of(len(result['per_class']), 'class')} in them or predicted. {said}"


def _class_sections(result: dict[str, Any]) -> Iterator[Section]:
    """Yield the tables of a classifier: constant answers, every class, confusions, and the largest classes."""
    if "best_constant" in result:
        constants = (("training rows", result["base"]), (f"these {result['split']} rows", result["best_constant"]))
        yield _section(
            "constants",
            "Always answering one class",
            ("Most frequent among", "Class", "Accuracy", "Macro-F1"),
            [
                (rows, _name_tied(one), write_number(one["accuracy"], 4), write_number(one["macro_f1"], 4))
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
                _name(line["class"]),
                line["num_rows"],
                line["num_predicted"],
                *(write_number(line[score], 4) for score in ("precision", "recall", "f1")),
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
                (_name(line["reference"]), _name(line["predicted"]), line["num_rows"], f"{line['fraction']:.1%}")
                for line in result["confusions"]
            ],
            num_text_columns=2,
        )
    if "class_shares" in result:
        yield _section(
            "shares",
            f"Largest classes in train and {result['split']}",
            ("Class", "Training rows", "Share", "Rows", "Share"),
            [
                (
                    _name(line["class"]),
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


def _class_samples(result: dict[str, Any]) -> Iterator[Block]:
    for sample in result["samples"]:
        reference, tuned = _name(sample["reference"]), _name(sample["tuned"])
        verdict = f"{reference}, rightly" if reference == tuned else f"{reference}, taken for {tuned}"
        title = f"Row {sample['row_id']}: {verdict} (probability {sample['probability']:.2f})"
        yield Sample(title, "Text", keep_ends(sample["text"], _TEXT_CHARACTERS))


def _language_samples(result: dict[str, Any]) -> Iterator[Block]:
    samples = result["samples"]
    shared, questions, ending = split_shared([sample["prompt"] for sample in samples])
    if shared or ending:
        title = "What all these prompts begin and end with is shown once:"
        yield Preformatted(f"{shared}…{ending}", title, is_brief=False)
    for sample, question in zip(samples, questions, strict=True):
        yield Sample(
            f"Row {sample['row_id']}",
            "Prompt",
            keep_ends(question, _TEXT_CHARACTERS),
            {name.capitalize(): keep_ends(sample[name], _TEXT_CHARACTERS) for name in ("reference", "base", "tuned")},
        )


def split_shared(prompts: Sequence[str]) -> tuple[str, list[str], str]:
    """Remove the lines that all prompts begin and end with: the template's, and a fixed instruction.

    Args:
        prompts: decoded prompts.

    Returns:
        The shared start and end, in whole lines, and what lies between them in each prompt. Nothing is shared by a
        single prompt.
    """
    if len(set(prompts)) < 2:
        return "", list(prompts), ""
    start = _whole_lines(os.path.commonprefix(list(prompts)))
    rests = [prompt[len(start) :] for prompt in prompts]
    ending = _whole_lines(os.path.commonprefix([rest[::-1] for rest in rests]))[::-1]
    return start, [rest[: len(rest) - len(ending)] for rest in rests], ending


def _whole_lines(text: str) -> str:
    """Cut a text after its last line break."""
    return text[: text.rfind("\n") + 1]


def _name_tied(constant: dict[str, Any]) -> str:
    return name_tied(_name(constant["class"]), constant.get("num_tied_classes", 1))


def _name(text: str) -> str:
    return keep_ends(on_one_line(text), _NAME_CHARACTERS)
