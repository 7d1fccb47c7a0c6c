"""Report what an evaluation found: the figures of both models, tables, samples, and where to go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lm_tuning.evaluation.answer_report import answer_sample_sections, answer_sections
from lm_tuning.evaluation.class_report import class_sections, name_class, name_constant
from lm_tuning.evaluation.parts import part_sections
from lm_tuning.evaluation.quantized import quantized_section
from lm_tuning.evaluation.records import (
    ClassEvaluation,
    EvaluationRecord,
    LanguageEvaluation,
    TrainingFacts,
)
from lm_tuning.evaluation.score_report import score_sections, verdict_blocks
from lm_tuning.findings import Issue
from lm_tuning.parameters.gate import LANGUAGE_FIGURES
from lm_tuning.reporting.document import (
    Block,
    Code,
    Issues,
    Item,
    Items,
    Paragraph,
    Report,
    Sample,
    Section,
    Table,
)
from lm_tuning.reporting.text import keep_ends, write_difference, write_fall, write_number
from lm_tuning.wording import count_of, write_speed

MLFLOW_COMMAND = "make mlflow"

_TEXT_CHARACTERS = 400
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
    base = "Majority class" if result["task"] == "sequence_classification" else "Base"
    return Report(
        "Evaluation",
        tiles=_tiles(result),
        summary=[
            *([Issues(warnings)] if warnings else []),
            *verdict_blocks(result),
            Paragraph(_describe_rows(result)),
            Table("", ("", base, "Tuned", "Change"), _figures(result)),
        ],
        sections=[section for build in SECTIONS for section in build(result)],
        closing=closing,
    )


def _sections_of_classes(result: EvaluationRecord) -> Iterator[Section]:
    if result["task"] == "sequence_classification":
        yield from class_sections(result)


def _sample_sections(result: EvaluationRecord) -> Iterator[Section]:
    if result["task"] == "sequence_classification":
        yield from _class_samples(result)
    else:
        yield from answer_sample_sections(result)


def _sections_of_parts(result: EvaluationRecord) -> Iterator[Section]:
    if "parts" in result:
        titles = {score["name"]: score["title"] for score in result.get("scores", [])}
        yield from part_sections(result["parts"], titles, result.get("group_column"))


def _sections_of_quantized(result: EvaluationRecord) -> Iterator[Section]:
    section = quantized_section(result)
    if section is not None:
        yield section


SECTIONS: tuple[Callable[[EvaluationRecord], Iterator[Section]], ...] = (
    score_sections,
    _sections_of_classes,
    answer_sections,
    _sections_of_parts,
    _sections_of_quantized,
    _sample_sections,
)
"""What a report is built of, in its order. Each yields nothing for a result that it has nothing to say about."""


def _tiles(result: EvaluationRecord) -> list[tuple[str, str]]:
    """Return the few figures that a page begins with."""
    scores = result.get("scores", [])
    tiles = []
    for score in scores[:2]:
        for name, record in (("tuned", score["tuned"]), ("base", score["base"])):
            tiles.append((f"{score['title']}, {name}", write_number(record["value"], 3)))
    if scores:
        tiles.append(("than the base", scores[0]["outcome"]))
    return [*tiles, ("rows", _count_rows(result).removesuffix(" rows").removesuffix(" row"))]


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
        # The one that decides, where evaluate.scores.names leaves ROUGE-L out.
        first = None if "rouge_l" in result.get("signatures", {"rouge_l"}) else _first_of_answers(result)
        figures.append(first or rouge)
    return figures


def _first_of_answers(result: LanguageEvaluation) -> _Figure | None:
    """Return the first score of answers; ``None`` where there is none."""
    score = next((score for score in result.get("scores", []) if score["name"] not in LANGUAGE_FIGURES), None)
    if score is None:
        return None
    name = f"{score['title']} ({score['unit']})" if score["unit"] else score["title"]
    return _score(name, score["base"]["value"], score["tuned"]["value"], score["difference"]["value"])


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
    named = name_constant(base)
    said = f"The majority class of the training rows is {named}; always answering it is right for {always:.2%}"
    if most > always:
        said += f". The best constant answer on this split is {name_constant(best)}, right for {most:.2%}"
    else:
        said += ", and no other constant answer for more"
    return f"{_count_rows(result)}, {count_of(len(result['per_class']), 'class')} in them or predicted. {said}"


def _class_samples(result: ClassEvaluation) -> Iterator[Section]:
    blocks = []
    for row in result["samples"]:
        reference, tuned = name_class(row["reference"]), name_class(row["tuned"])
        verdict = f"{reference}, rightly" if reference == tuned else f"{reference}, taken for {tuned}"
        title = f"Row {row['row_id']}: {verdict} (probability {row['probability']:.2f})"
        blocks.append(Sample(title, "Text", keep_ends(row["text"], _TEXT_CHARACTERS)))
    if blocks:
        yield Section("samples", "Samples", blocks)
