"""Report what an evaluation found: the figures of both models, tables, samples, and where to go on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from lm_tuning.data.split.class_shares import name_tied
from lm_tuning.evaluation.quantized import quantized_section
from lm_tuning.evaluation.records import (
    ClassEvaluation,
    ConstantFigures,
    EvaluationRecord,
    LanguageEvaluation,
    MajorityFigures,
    TrainingFacts,
)
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


def compose_report(result: EvaluationRecord, facts: TrainingFacts) -> Report:
    """Lay out the whole report.

    Args:
        result: what ``evaluate_models`` gives as ``result``.
        facts: where the tuned model lies, and how fast it was trained.
    """
    closing = _closing(result, facts)
    if result["skipped"]:
        return Report("Evaluation", describe_outcome(result), closing=closing)
    warnings = [Issue("warn", "evaluation", warning) for warning in result["warnings"]]
    base, sections = "Base", []
    if result["task"] == "sequence_classification":
        base, sections = "Majority class", list(_class_sections(result))
    quantized = quantized_section(result)
    if quantized is not None:
        sections.append(quantized)
    if result["samples"]:
        sections.append(Section("samples", "Samples", list(_samples(result))))
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


def describe_outcome(result: EvaluationRecord) -> str:
    """Describe the outcome in one line for the log.

    Args:
        result: what ``evaluate_models`` gives as ``result``.
    """
    if result["skipped"]:
        return f"Evaluation skipped. {result['skipped']}"
    changes = [f"{name} {base} -> {tuned} ({change})" for name, base, tuned, change in _figures(result)]
    return f"{_describe_rows(result)} {'; '.join(changes)}."


def _closing(result: EvaluationRecord, facts: TrainingFacts) -> list[Block]:
    speeds = {
        "tokens": facts["tokens_per_second"],
        "samples": facts["samples_per_second"],
        "steps": facts["steps_per_second"],
    }
    said = ", ".join(f"{write_speed(speed)} {unit} per second" for unit, speed in speeds.items() if speed is not None)
    items = [
        *([Item(f"Training speed: {said}")] if said else []),
        Item((f"{_ADAPTERS.get(result['tuned_method'], 'Tuned weights')}: ", Code(facts["tuned_folder"]))),
        Item(("All runs in the MLflow UI: ", Code(MLFLOW_COMMAND))),
    ]
    return [Items(items)]


_Figure = tuple[str, str, str, str]


def _figures(result: EvaluationRecord) -> list[_Figure]:
    """Return the figures that are shown: name with unit, value of both models, and the change."""
    if result["task"] == "sequence_classification":
        majority, classifier, gain = result["base"], result["tuned"], result["improvement"]
        return [
            _score("Accuracy (0 to 1)", majority["accuracy"], classifier["accuracy"], gain["accuracy_difference"]),
            _score("Macro-F1 (0 to 1)", majority["macro_f1"], classifier["macro_f1"], gain["macro_f1_difference"]),
            _loss("nats per row", majority["nats_per_row"], classifier["nats_per_row"], gain["nats_per_row_fraction"]),
        ]
    base, tuned, change = result["base"], result["tuned"], result["improvement"]
    figures = [
        _loss("nats per token", base["nats_per_token"], tuned["nats_per_token"], change["nats_per_token_fraction"]),
        (
            "Perplexity",
            write_number(base["perplexity"], 2),
            write_number(tuned["perplexity"], 2),
            write_fall(change["perplexity_fraction"]),
        ),
    ]
    # Without answers there is none, which the sentence above the table says with its reason.
    if base["num_generated"]:
        rouge = _score("ROUGE-L (0 to 1)", base["rouge_l"], tuned["rouge_l"], change["rouge_l_difference"])
        figures.append(rouge)
    return figures


def _score(name: str, base: float | None, tuned: float | None, difference: float | None) -> _Figure:
    # What is between 0 and 1 is compared by difference: a share of a score near 0 says nothing.
    return name, write_number(base, 4), write_number(tuned, 4), write_difference(difference)


def _loss(unit: str, base: float | None, tuned: float | None, fraction: float | None) -> _Figure:
    return f"Held-out loss ({unit})", write_number(base, 4), write_number(tuned, 4), write_fall(fraction)


def _describe_rows(result: EvaluationRecord) -> str:
    """Describe in a sentence or two what was measured on what."""
    measured = _describe_classes(result) if result["task"] == "sequence_classification" else _describe_answers(result)
    return f"{str(result['split']).capitalize()} split: {measured}."


def _describe_answers(result: LanguageEvaluation) -> str:
    base, tuned = result["base"], result["tuned"]
    token = "target token" if result["task"] == "seq2seq_lm" else "supervised token"
    said = f"{_count_rows(result)}, {count_of(base['num_tokens'], token)}"
    if base["num_generated"]:
        said += f", {count_of(base['num_generated'], 'answer')} of each model"
        if result.get("generation", "greedy") != "greedy":
            said += f" by {result['generation']}"
        if base["num_empty"] or tuned["num_empty"]:
            said += f" ({base['num_empty']:,} empty from base, {tuned['num_empty']:,} from tuned)"
    elif "no_answers" in result:
        said += f". No ROUGE, since {result['no_answers']}"
    return said


def _count_rows(result: EvaluationRecord) -> str:
    """Count the measured rows, and where those are not all, the rows of the split."""
    num_rows, num_split_rows = result["num_rows"], result["num_split_rows"]
    if num_rows == num_split_rows:
        return count_of(num_rows, "row")
    return f"{num_rows:,} of {count_of(num_split_rows, 'row')}"


def _describe_classes(result: ClassEvaluation) -> str:
    base, best = result["base"], result["best_constant"]
    # Without a value there is no row, and then no report of them.
    always, most = base["accuracy"] or 0.0, best["accuracy"] or 0.0
    said = (
        f"The majority class of the training rows is {_name_tied(base)}; always answering it is right for {always:.2%}"
    )
    if most > always:
        said += f". The best constant answer on this split is {_name_tied(best)}, right for {most:.2%}"
    else:
        said += ", and no other constant answer for more"
    return f"{_count_rows(result)}, {count_of(len(result['per_class']), 'class')} in them or predicted. {said}"


def _class_sections(result: ClassEvaluation) -> Iterator[Section]:
    """Yield the tables of a classifier: constant answers, every class, confusions, and the largest classes."""
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
                (_name(line["reference"]), _name(line["predicted"]), line["num_rows"], f"{line['fraction']:.1%}")
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


def _samples(result: EvaluationRecord) -> Iterator[Block]:
    if result["task"] == "sequence_classification":
        for row in result["samples"]:
            reference, tuned = _name(row["reference"]), _name(row["tuned"])
            verdict = f"{reference}, rightly" if reference == tuned else f"{reference}, taken for {tuned}"
            title = f"Row {row['row_id']}: {verdict} (probability {row['probability']:.2f})"
            yield Sample(title, "Text", keep_ends(row["text"], _TEXT_CHARACTERS))
        return
    # The template and a fixed instruction can be longer than all the rest, and would be all that the samples show.
    shared, questions, ending = split_shared([sample["prompt"] for sample in result["samples"]])
    if shared or ending:
        title = "What all these prompts begin and end with is shown once:"
        yield Preformatted(f"{shared}…{ending}", title, is_brief=False)
    for sample, question in zip(result["samples"], questions, strict=True):
        answers = {"Reference": sample["reference"], "Base": sample["base"], "Tuned": sample["tuned"]}
        yield Sample(
            f"Row {sample['row_id']}",
            "Prompt",
            keep_ends(question, _TEXT_CHARACTERS),
            {name: keep_ends(text, _TEXT_CHARACTERS) for name, text in answers.items()},
        )


def split_shared(prompts: Sequence[str]) -> tuple[str, list[str], str]:
    """Remove the lines that all prompts begin and end with: the template's, and a fixed instruction.

    Args:
        prompts: decoded prompts.

    Returns:
        The shared start and end, in whole lines, and what lies between them in each prompt. Nothing is shared by a
        single prompt.
    """
    # Of a single prompt, or of equal ones, everything would be shared and nothing shown.
    if len(set(prompts)) < 2:
        return "", list(prompts), ""
    # Whole lines: a common beginning of words would tear the prompts apart in the middle of a sentence.
    start = _whole_lines(os.path.commonprefix(list(prompts)))
    rests = [prompt[len(start) :] for prompt in prompts]
    # The common beginning of the reversed texts, looked for behind the shared start, so that both cannot overlap.
    ending = _whole_lines(os.path.commonprefix([rest[::-1] for rest in rests]))[::-1]
    return start, [rest[: len(rest) - len(ending)] for rest in rests], ending


def _whole_lines(text: str) -> str:
    """Cut a text after its last line break."""
    return text[: text.rfind("\n") + 1]


def _name_tied(constant: ConstantFigures | MajorityFigures) -> str:
    return name_tied(_name(str(constant["class"])), constant["num_tied_classes"] or 1)


def _name(text: str) -> str:
    # Classes have their names from rows, of any length and with whatever is in them.
    return keep_ends(on_one_line(text), _NAME_CHARACTERS)
