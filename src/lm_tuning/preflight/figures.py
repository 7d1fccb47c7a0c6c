"""Inspect a run's rows: gather all figures, in which every row that was read has exactly one outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

from lm_tuning.batching.micro_batches import choose_batching, choose_micro_batch_tokens
from lm_tuning.batching.step_plan import plan_steps
from lm_tuning.data.format.columns import SEQ2SEQ_LM, SEQUENCE_CLASSIFICATION
from lm_tuning.data.records import SPLITS
from lm_tuning.data.rows_report import count_rows_in_file
from lm_tuning.data.split.records import SplitsSummary
from lm_tuning.errors import UserError
from lm_tuning.findings import SEVERITIES, SEVERITY_WORDS, Issue
from lm_tuning.models.loading import load_tokenizer, read_config
from lm_tuning.models.record import location_of
from lm_tuning.models.structure import longest_text, position_limit
from lm_tuning.parameters import ModelParameters, PreflightParameters, TokenizeParameters, TrainParameters
from lm_tuning.preflight.issues import find_issues, store_issue
from lm_tuning.preflight.records import DivisionFigures, Inspection, Outcome, PreflightFigures, RowAccount, StoredRows
from lm_tuning.preflight.rows import count_labels, measure_lengths
from lm_tuning.preflight.steps import choose_steps, chosen_way, describe_schedule, measure_padding
from lm_tuning.preflight.tokens import decode_examples, inspect_special_tokens, judge_special_tokens, measure_vocabulary
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.runtime.device import current_device
from lm_tuning.storage.folders import read_manifest
from lm_tuning.text.records import TokenSummary
from lm_tuning.text.store.table import open_split
from lm_tuning.text.tokenizers.counts import DROPPED
from lm_tuning.wording import count_of


def account_for_rows(split_summary: SplitsSummary, token_summary: TokenSummary) -> RowAccount:
    """Follow the rows from the files to the training.

    Args:
        split_summary: what the split pipeline says about its rows.
        token_summary: what tokenizing says about them.

    Returns:
        ``num_rows_read``, and ``fates``: for each ``stage``, ``reason`` and ``num_rows``, from the first stage that
        takes rows away to the rows that are used. They add up to the rows read.
    """
    files = split_summary["files"]
    num_read = sum(file["rows_read"] for file in files)
    skipped: Counter[str] = Counter()
    for file in files:
        skipped.update(file["rows_skipped"])
    outcomes = [_outcome("skipped", kind.replace("_", " "), num_rows) for kind, num_rows in skipped.most_common()]
    near = split_summary["near_duplicates"]
    # None means that nobody looked for near duplicates, so none were left out.
    outcomes += [
        _outcome("left out of the splits", "copy of another row", split_summary["duplicates"]["num_dropped"]),
        _outcome("left out of the splits", "almost a copy of another row", near["num_dropped"] if near else 0),
    ]
    used = []
    for split in SPLITS:
        facts = token_summary["splits"][split]
        assert facts["num_rows_read"] == split_summary["rows"][split], (
            f"{split}: {split_summary['rows'][split]} rows were split off, {facts['num_rows_read']} were tokenized"
        )
        for reason, num_rows in facts["dropped"].items():
            outcomes.append(_outcome(f"dropped in tokenizing ({split})", DROPPED.get(reason, reason), num_rows))
        used.append(_outcome("used", "trained on" if split == "train" else split, facts["num_rows"]))
    # What is used is listed even without rows: an empty test split is worth seeing.
    outcomes = [outcome for outcome in outcomes if outcome["num_rows"]] + used
    # An invariant of ours, not the user's doing: a row that is lost between two stages is a bug, and must not pass.
    total = sum(outcome["num_rows"] for outcome in outcomes)
    assert total == num_read, f"{num_read} rows were read, but their outcomes add up to {total}: {outcomes}"
    return {"num_rows_read": num_read, "fates": outcomes}


def _outcome(stage: str, reason: str, num_rows: int) -> Outcome:
    return {"stage": stage, "reason": reason, "num_rows": int(num_rows)}


def inspect_tokens(
    rows: StoredRows,
    tokenizer: Any,
    *,
    model: ModelParameters,
    tokenize: TokenizeParameters,
    train: TrainParameters,
    preflight: PreflightParameters,
    seed: int,
    device: str,
    max_positions: int | None = None,
    num_embeddings: int | None = None,
    on_progress: OnProgress = ignore_progress,
) -> PreflightFigures:
    """Look at stored tokens as training will use them. Needs neither torch nor the model's weights.

    Args:
        rows: what is stored of them.
        tokenizer: the tokenizer that made them.
        model: the ``model`` parameters: attention.
        tokenize: the ``tokenize`` parameters: the limit that the tokens were made with.
        train: the ``train`` parameters: steps, epochs and micro-batches, and what happens between the steps.
        preflight: the ``preflight`` parameters: rows to decode.
        seed: order of rows.
        device: ``cpu``, ``cuda`` or ``mps``: where training would run.
        max_positions: positions in the model's config; ``None`` where it names none.
        num_embeddings: token ids that the model embeds, as its configuration says; ``None`` where it does not.
        on_progress: receives rows and steps looked at.

    Returns:
        All figures, as JSON holds them: ``metrics`` (numbers by name), ``concerns`` (the issues, the gravest first)
        and one entry a section.

    Raises:
        UserError: the tokens were made from other splits, or the parameters allow no plan.
    """
    tokens, splits = rows.tokens, rows.splits
    token_summary, split_summary = rows.token_summary, rows.split_summary
    # Row ids of other splits would name other rows, and nothing further on would notice.
    made_from, present = read_manifest(tokens)["facts"]["sources"]["splits"], read_manifest(splits)["key"]
    if made_from != present:
        raise UserError(
            f"The tokens in {tokens} were made from other splits ({made_from}) than the present ones ({present}). "
            "Run all pre-training checks: kedro run --pipelines=preflight."
        )
    task = token_summary["task"]
    if task == SEQ2SEQ_LM and train.batching == "packed":
        raise UserError(
            "train.batching: packed cannot be used with task: seq2seq_lm, since an encoder would see the neighbours of "
            "a source. Set it to auto or padded."
        )
    table = open_split(tokens, "train")
    sources = token_summary["sources"]
    plan = plan_steps(table, sources=sources, seed=seed, train=train)
    # The same steps for padding and schedule, so that the report speaks of one sample.
    steps = choose_steps(plan)
    asked = None if train.micro_batch_tokens == "auto" else train.micro_batch_tokens
    budget = choose_micro_batch_tokens(asked, device=device)
    chosen = choose_batching(train.batching, device=device, attention=model.attention, can_pack=task != SEQ2SEQ_LM)
    of_train = token_summary["splits"]["train"]
    max_target_tokens = token_summary.get("max_target_tokens")
    # Where classes are what is supervised, rows with tokens count.
    rows_by_class: Mapping[str, Mapping[str, int]] | None = None
    if task == SEQUENCE_CLASSIFICATION:
        rows_by_class = {split: token_summary["splits"][split]["rows_by_class"] for split in SPLITS}
    # Splits that an earlier version stored, and that preflight alone reads, do not say which classes were lost.
    told = {"lost_classes": None, **split_summary}
    special = inspect_special_tokens(tokens, tokenizer, task=task, on_progress=on_progress)
    figures: Inspection = {
        "task": task,
        "model": rows.base_model["name_or_path"],
        "device": device,
        "format": split_summary["format"],
        "rendering": token_summary["rendering"],
        # Either may be the tighter one, and both are only what the files say: training warns, and does not refuse.
        "context_tokens": min(filter(None, (longest_text(tokenizer), max_positions)), default=None),
        "num_rows": {split: token_summary["splits"][split]["num_rows"] for split in SPLITS},
        "num_tokens": {split: token_summary["splits"][split]["num_tokens"] for split in SPLITS},
        "files": [
            {
                "path": file["path"],
                "split": file["split"],
                "rows_read": file["rows_read"],
                "rows_in_file": count_rows_in_file(file),
            }
            for file in split_summary["files"]
        ],
        # Splits that an earlier version has made do not say it.
        "max_rows": split_summary.get("max_rows"),
        "rows": account_for_rows(split_summary, token_summary),
        "findings": {
            kind: {"num_rows": one["num_rows"], "meaning": one["meaning"], "fate": one["fate"]}
            for kind, one in rows.findings.items()
        },
        "changed": of_train["changed"],
        "splits": cast("DivisionFigures", {key: told[key] for key in DivisionFigures.__annotations__}),
        "lengths": measure_lengths(
            table.lengths,
            table.num_supervised,
            max_length_tokens=tokenize.max_length_tokens,
            summary=of_train,
            task=task,
            max_target_tokens=max_target_tokens,
        ),
        "padding": measure_padding(
            plan,
            table.lengths,
            steps,
            micro_batch_tokens=budget,
            batching=chosen,
            max_length_tokens=tokenize.max_length_tokens,
            targets=table.num_supervised if task == SEQ2SEQ_LM else None,
            max_target_tokens=max_target_tokens or 0,
            on_progress=on_progress,
        ),
        "schedule": describe_schedule(plan, table, steps, sources=sources, train=train),
        "labels": count_labels(splits, split_summary, rows_by_class=rows_by_class),
        "vocabulary": measure_vocabulary(tokens, tokenizer, num_embeddings=num_embeddings),
        "special_tokens": {**special, "judgements": judge_special_tokens(special)},
        "examples": decode_examples(
            table, tokenizer, split_summary, num_examples=preflight.num_examples, label_map=token_summary["label_map"]
        ),
    }
    issues = find_issues(figures)
    return {"metrics": _metrics(figures, issues), "concerns": [store_issue(issue) for issue in issues], **figures}


def describe_preflight(figures: PreflightFigures) -> list[str]:
    """Describe the outcome in a few lines for the log.

    Args:
        figures: see ``inspect_tokens``.
    """
    schedule, lengths, padding = figures["schedule"], figures["lengths"], figures["padding"]
    labels = figures["labels"]
    if labels and figures["task"] == SEQUENCE_CLASSIFICATION:
        supervised = (
            f"{count_of(labels['num_classes'], 'class')}, the largest with {labels['majority_fraction']:.1%} "
            "of the rows"
        )
    else:
        supervised = f"{lengths['supervised_fraction']:.1%} of the tokens supervised"
    lines = [
        f"Preflight: {count_of(figures['rows']['num_rows_read'], 'row')} read, {lengths['num_rows']:,} trained on; "
        f"{count_of(schedule['steps_per_epoch'], 'step')} and {count_of(schedule['tokens_per_epoch'], 'token')} per "
        f"epoch, {count_of(schedule['total_steps'], 'step')} in all; {supervised}; "
        f"padding {chosen_way(padding)['padding_fraction']:.1%} ({padding['batching']})."
    ]
    counts = Counter(issue["level"] for issue in figures["concerns"])
    if counts["stop"]:
        lines.append("Training would refuse to start, or be in vain; see the issues.")
    if counts:
        levels = [SEVERITY_WORDS[severity] for severity in SEVERITIES]
        lines.append(f"Issues: {', '.join(count_of(counts[level], level) for level in levels if counts[level])}.")
    return [*lines, "All of it, with every example: preflight.html and preflight.md, beside the data report."]


def _metrics(figures: Inspection, issues: list[Issue]) -> dict[str, float]:
    lengths, schedule, padding = figures["lengths"], figures["schedule"], figures["padding"]
    fractions = {choice["name"]: choice["padding_fraction"] for choice in padding["choices"]}
    metrics = {
        "data_supervised_fraction": lengths["supervised_fraction"],
        "data_tokens_per_row_mean": lengths["quantiles"]["row"]["mean"],
        "data_tokens_per_row_p99": lengths["quantiles"]["row"]["p99"],
        "data_tokens_per_row_max": lengths["quantiles"]["row"]["max"],
        **_target_metrics(figures),
        "data_rows_at_limit_fraction": lengths["at_limit_fraction"],
        **{f"data_padding_fraction_{name}": fraction for name, fraction in fractions.items()},
        "data_steps_per_epoch": schedule["steps_per_epoch"],
        "data_tokens_per_epoch": schedule["tokens_per_epoch"],
        "data_total_steps": schedule["total_steps"],
        "data_total_tokens": schedule["tokens_of_run"],
        "data_end_learned_fraction": figures["special_tokens"]["end_learned_fraction"],
        "data_preflight_stops": sum(issue.severity == "stop" for issue in issues),
        "data_preflight_warnings": sum(issue.severity == "warn" for issue in issues),
    }
    if figures["labels"]:
        metrics["data_majority_fraction"] = figures["labels"]["majority_fraction"]
    # MLflow takes numbers only; what does not apply to the task is left out rather than logged as 0.
    return {name: float(value) for name, value in metrics.items() if value is not None}


def _target_metrics(figures: Inspection) -> dict[str, float]:
    """Tell the lengths of source and target apart, for rows that have them."""
    if figures["task"] != SEQ2SEQ_LM:
        return {}
    quantiles = figures["lengths"]["quantiles"]
    return {
        f"data_tokens_per_{side}_{name}": quantiles[side][name]
        for side in ("source", "target")
        for name in ("mean", "p99", "max")
    }


def inspect_run(
    rows: StoredRows,
    *,
    model: ModelParameters,
    tokenize: TokenizeParameters,
    train: TrainParameters,
    preflight: PreflightParameters,
    seed: int,
    on_progress: OnProgress = ignore_progress,
) -> PreflightFigures:
    """Inspect the tokens of a run as its training would use them, with the tokenizer and the config of its model.

    Args:
        rows: what is stored of them.
        model: the ``model`` parameters.
        tokenize: the ``tokenize`` parameters.
        train: the ``train`` parameters.
        preflight: the ``preflight`` parameters.
        seed: order of rows.
        on_progress: receives rows and steps done.

    Returns:
        All figures, see ``inspect_tokens``.

    Raises:
        UserError: the tokens were made from other splits, or the parameters allow no plan.
    """
    location = location_of(rows.base_model)
    # The config alone says how many positions and embeddings there are: no weights are read, so no GPU is needed.
    tokenizer, config = load_tokenizer(**location), read_config(**location)
    return inspect_tokens(
        rows,
        tokenizer,
        model=model,
        tokenize=tokenize,
        train=train,
        preflight=preflight,
        seed=seed,
        device=current_device().kind,
        max_positions=position_limit(config),
        num_embeddings=getattr(config.get_text_config(), "vocab_size", None),
        on_progress=on_progress,
    )
