"""Nodes of the export pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from lm_tuning.export.records import ExportRecord, NotServed, ServedModel, UploadRecord
from lm_tuning.models.record import ModelLocation
from lm_tuning.parameters import EvaluateParameters, ExportParameters, ModelParameters
from lm_tuning.pipelines import DIGEST_CACHE
from lm_tuning.progress import show_progress


def export_model(
    tuned_model: Path,
    tokenized_examples: Path,
    export_work: Path,
    report_folder: Path,
    raw_examples: dict[str, Any],
    *,
    export: ExportParameters,
    model: ModelParameters,
) -> tuple[Path, ExportRecord]:
    """Write the tuned model in the form that is asked for, and compare it with what was trained."""
    from lm_tuning.export import card, checks, report, run
    from lm_tuning.runtime.device import describe_device

    plan = checks.plan_export(
        tuned_model, tokenized_examples, export, base=_location_of(model), digest_cache=DIGEST_CACHE, target=export_work
    )
    sources = card.CardSources(report_folder, raw_examples)
    with show_progress() as on_progress:
        made = run.export_model(plan, export_work, device=describe_device().kind, card=sources, on_progress=on_progress)
    Console().print(report.describe_export(made.record))
    return made.folder, made.record


def _location_of(model: ModelParameters) -> ModelLocation:
    return ModelLocation(
        name_or_path=model.name_or_path, revision=model.revision, trust_remote_code=model.trust_remote_code
    )


def serve_export(
    exported_model: Path,
    export_record: ExportRecord,
    tuned_model: Path,
    tokenized_examples: Path,
    *,
    export: ExportParameters,
    evaluate: EvaluateParameters,
) -> ServedModel | NotServed:
    """Describe the export to MLflow as a model that answers requests, if parameters ask for one."""
    if not export.logs_model:
        return {"is_wanted": False}
    from lm_tuning.export.served import describe_served

    most = evaluate.generation.max_new_tokens
    return describe_served(exported_model, export_record, tuned_model, tokenized_examples, export, max_new_tokens=most)


def upload_export(exported_model: Path, *, export: ExportParameters) -> UploadRecord:
    """Upload the export to a model hub, or show what would be sent; nothing of both unless parameters ask for it."""
    from lm_tuning.export.upload import upload_folder

    return upload_folder(exported_model, export.hub_repository, dry_run=export.hub_dry_run, private=export.hub_private)
