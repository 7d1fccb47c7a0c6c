"""Report where a language model's answers go wrong, and the text of the rows that are named."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from lm_tuning.evaluation.analysis_records import HistogramRecord, LengthRecord, RowTextRecord
from lm_tuning.evaluation.answer_kinds import RULES
from lm_tuning.evaluation.records import EvaluationRecord, LanguageEvaluation
from lm_tuning.reporting.document import (
    Block,
    Cell,
    Histogram,
    Inline,
    Item,
    Items,
    Link,
    Paragraph,
    Preformatted,
    Sample,
    Section,
    Table,
    Words,
)
from lm_tuning.reporting.text import NOTHING, keep_ends, write_number, write_share
from lm_tuning.wording import count_of

_TEXT_CHARACTERS = 400


def answer_sections(result: EvaluationRecord) -> Iterator[Section]:
    """Yield the analysis of answers and losses, as far as there is one.

    Args:
        result: of an evaluation; that of a classifier has no answers.
    """
    if result["task"] == "sequence_classification":
        return
    if result.get("answer_kinds"):
        yield Section("kinds", "Answers by kind", list(_kinds(result)))
    if lengths := result.get("answer_lengths"):
        yield Section("lengths", "Answers by length", list(_lengths(result, lengths)), is_brief=False)
    if histograms := result.get("histograms"):
        yield Section("spread", "Losses and lengths", [_histogram(each) for each in histograms], is_brief=False)
    if result.get("hard_rows"):
        yield Section("hard", "Hardest rows", list(_hard_rows(result)), is_brief=False)


def answer_sample_sections(result: LanguageEvaluation) -> Iterator[Section]:
    """Yield the texts of the rows that are shown: the best, the worst, some by chance, and those that tables name.

    Args:
        result: of an evaluation.
    """
    texts = {row["row_id"]: row for row in result.get("row_texts", [])}
    # What is drawn by chance, and all that earlier versions stored.
    for sample in result["samples"]:
        texts.setdefault(
            sample["row_id"],
            {
                "row_id": sample["row_id"],
                "prompt": sample["prompt"],
                "reference": sample["reference"],
                "base": sample["base"],
                "tuned": sample["tuned"],
            },
        )
    if not texts:
        return
    title = _score_title(result)
    # Under the first heading that it fits, since each has one anchor. What is drawn at random is for the terminal too.
    groups = [
        ("samples", "Samples", [sample["row_id"] for sample in result["samples"]]),
        ("best", f"Best by {title}", result.get("best_rows", [])),
        ("worst", f"Worst by {title}", result.get("worst_rows", [])),
        ("others", "Other rows", list(texts)),
    ]
    shared, questions, ending = split_shared([row["prompt"] for row in texts.values()])
    asked = dict(zip(texts, questions, strict=True))
    opening: list[Block] = []
    if shared or ending:
        shown = "What all these prompts begin and end with is shown once:"
        opening = [Preformatted(f"{shared}…{ending}", shown, is_brief=False)]
    seen: set[int] = set()
    for key, heading, row_ids in groups:
        new = [row_id for row_id in dict.fromkeys(row_ids) if row_id not in seen]
        if new:
            seen |= set(new)
            samples = [_sample(texts[row_id], asked[row_id], title) for row_id in new]
            yield Section(key, heading, [*opening, *samples], is_brief=key == "samples")
            opening = []


def _histogram(record: HistogramRecord) -> Histogram:
    return Histogram(record["title"], record["unit"], record["edges"], record["counts"])


def _kinds(result: LanguageEvaluation) -> Iterator[Block]:
    title, num = _score_title(result), result["tuned"]["num_generated"]
    yield Paragraph(f"Of {count_of(num, 'answer')} of each model. An answer may be of several kinds.")
    yield Table(
        "",
        ("Answer", "Base", "Tuned", "Share of tuned", f"{title} of these", "Such as row"),
        [
            (
                kind["kind"],
                kind["num_base"],
                kind["num_tuned"],
                write_share(kind["num_tuned"], num),
                write_number(kind["tuned_score"], 4),
                _links(kind["row_ids"]),
            )
            for kind in result["answer_kinds"]
        ],
        text_columns=(0, 5),
    )
    rules = [Item(f"{kind['kind']}: {RULES[kind['kind']]}") for kind in result["answer_kinds"] if kind["kind"] in RULES]
    if rules:
        yield Items(rules)


def _lengths(result: LanguageEvaluation, lengths: Sequence[LengthRecord]) -> Iterator[Block]:
    title = _score_title(result)
    for of in ("prompt", "reference"):
        rows: list[tuple[Cell, ...]] = [
            (
                f"{line['low']:,} to {line['high']:,}" if line["low"] < line["high"] else f"{line['low']:,}",
                line["num_rows"],
                write_number(line["base"], 4),
                write_number(line["tuned"], 4),
            )
            for line in lengths
            if line["of"] == of
        ]
        if rows:
            yield Table(
                f"{title} by length of the {of}",
                ("Characters", "Rows", "Base", "Tuned"),
                rows,
            )


def _hard_rows(result: LanguageEvaluation) -> Iterator[Block]:
    rows = result["hard_rows"]
    num_suspect = sum(row["is_suspect"] for row in rows)
    yield Paragraph(
        "The highest losses under the tuned model, in nats per supervised token. Read these first: a model is "
        "surprised by what is rare, and by what is wrong."
    )
    yield Table(
        "",
        ("Row", "Supervised tokens", "Base", "Tuned", "Wrong answer?", "Where"),
        [
            (
                _links([row["row_id"]]),
                row["num_tokens"],
                write_number(row["base_nats_per_token"], 3),
                write_number(row["tuned_nats_per_token"], 3),
                "likely" if row["is_suspect"] else NOTHING,
                row.get("where", NOTHING),
            )
            for row in rows
        ],
        text_columns=(0, 4, 5),
    )
    if num_suspect:
        yield Paragraph(
            "Likely wrong: the loss is more than three standard deviations (by the median deviation) above the median, "
            "and tuning has lowered it by as much less than usual."
        )


def _sample(row: RowTextRecord, question: str, title: str) -> Sample:
    answers = {"Reference": row["reference"]}
    if "base" in row and "tuned" in row:
        answers[_answer_name("Base", row.get("base_score"), row.get("base_kinds", []), title)] = row["base"]
        answers[_answer_name("Tuned", row.get("tuned_score"), row.get("tuned_kinds", []), title)] = row["tuned"]
    shown: Mapping[str, str] = {name: keep_ends(text, _TEXT_CHARACTERS) for name, text in answers.items()}
    key = f"row-{row['row_id']}"
    return Sample(f"Row {row['row_id']}", "Prompt", keep_ends(question, _TEXT_CHARACTERS), shown, key=key)


def _answer_name(model: str, score: float | None, kinds: Sequence[str], title: str) -> str:
    notes = [*([f"{title} {score:.3f}"] if score is not None else []), *kinds]
    return f"{model} ({'; '.join(notes)})" if notes else model


def _links(row_ids: Sequence[int]) -> Inline:
    words: list[Words] = []
    for row_id in row_ids:
        words += [", "] if words else []
        words.append(Link(str(row_id), f"row-{row_id}"))
    return tuple(words) or NOTHING


def _score_title(result: LanguageEvaluation) -> str:
    """Return what the score of answers is called that orders them: the first that is no loss."""
    return next((score["title"] for score in result.get("scores", []) if score["name"] != "nats_per_token"), "score")


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
