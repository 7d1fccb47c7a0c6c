"""Make the stored tokens of a run: what they are made from, the folder, and how much the limits may cut away."""

from __future__ import annotations

from pathlib import Path

from lm_tuning.models.loading import load_tokenizer, read_config
from lm_tuning.models.record import BaseModelRecord, location_of
from lm_tuning.models.structure import position_limit
from lm_tuning.parameters.data import DataParameters, TokenizeParameters
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.reporting.document import ReportSection
from lm_tuning.storage.folders import SCHEMA_VERSION, read_manifest
from lm_tuning.text import tokenize as tokenizing
from lm_tuning.text.records import TokensFacts, TokenSources, TokenSummary
from lm_tuning.text.store.summary import read_lengths, write_lengths
from lm_tuning.text.tokenizers.limit_losses import refuse_losses


def token_sources(
    splits: Path, base_model: BaseModelRecord, tokenize: TokenizeParameters, *, task: str
) -> TokenSources:
    """Return what the tokens of a run are made from.

    Args:
        splits: the stored folder of splits.
        base_model: whose tokenizer, see ``describe_base_model``.
        tokenize: the ``tokenize`` parameters.
        task: the ``task`` parameter.
    """
    # This one decides whether the tokens are taken, not which come out.
    left_out = {"max_lost_fraction"}
    # Left out where there are none: tokens of earlier versions keep their key.
    if not tokenize.template_arguments:
        left_out.add("template_arguments")
    return {
        "schema_version": SCHEMA_VERSION,
        "tokens_version": tokenizing.TOKENS_VERSION,
        "splits": read_manifest(splits)["key"],
        "tokenizer": base_model["tokenizer_digest"],
        "tokenize": tokenize.model_dump(exclude=left_out),
        "task": task,
    }


def make_tokens(
    folder: Path,
    *,
    splits: Path,
    base_model: BaseModelRecord,
    tokenize: TokenizeParameters,
    data: DataParameters,
    task: str,
    on_progress: OnProgress = ignore_progress,
) -> None:
    """Write tokens and a picture of their lengths.

    Args:
        folder: an empty folder.
        splits: the stored folder of splits.
        base_model: whose tokenizer, see ``describe_base_model``.
        tokenize: the ``tokenize`` parameters.
        data: the ``data`` parameters, of which bad rows are handled as in reading.
        task: the ``task`` parameter.
        on_progress: receives rows done.

    Raises:
        UserError: see ``write_tokens``; or the limits cut too many of the tokens away.
    """
    tokenizing.write_tokens(
        folder,
        splits,
        load_tokenizer(**location_of(base_model)),
        tokenize,
        task=task,
        on_bad_row=data.on_bad_row,
        max_bad_fraction=data.max_bad_fraction,
        on_progress=on_progress,
    )
    refuse_stored_losses(folder, base_model, tokenize)
    write_lengths(
        folder,
        task=task,
        max_length_tokens=tokenize.max_length_tokens,
        max_target_tokens=tokenize.max_target_tokens,
    )


def refuse_stored_losses(folder: Path, base_model: BaseModelRecord, tokenize: TokenizeParameters) -> None:
    """Refuse tokens of which the limits have cut too large a part away.

    Args:
        folder: the folder of tokens.
        base_model: see ``describe_base_model``.
        tokenize: the ``tokenize`` parameters; the part that may be lost can be another than when tokens were made.

    Raises:
        UserError: see ``refuse_losses``.
    """
    refuse_losses(
        tokenizing.read_token_summary(folder),
        max_lost_fraction=tokenize.max_lost_fraction,
        max_positions=positions_of(base_model),
        model_name=base_model["name_or_path"],
    )


def read_outputs(folder: Path) -> tuple[TokenSummary, bytes, ReportSection[TokensFacts]]:
    """Return what stored tokens come with: their summary, a picture of the lengths, and a section of the data report.

    Args:
        folder: the folder of tokens.
    """
    return tokenizing.read_token_summary(folder), read_lengths(folder), tokenizing.read_token_report(folder)


def positions_of(base_model: BaseModelRecord) -> int | None:
    """Return the positions in the model's config; ``None`` where it names none.

    Args:
        base_model: see ``describe_base_model``.
    """
    return position_limit(read_config(**location_of(base_model)))
