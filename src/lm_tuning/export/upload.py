"""Upload an export to a model hub, or show what would be sent."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from lm_tuning.errors import Interrupted, UserError
from lm_tuning.export.records import UploadRecord
from lm_tuning.models.hub import hub_answers
from lm_tuning.wording import count_of

logger = logging.getLogger(__name__)


def upload_folder(folder: Path, repository: str | None, *, dry_run: bool, private: bool) -> UploadRecord:
    """Send every file of an export to a repository.

    Args:
        folder: a published export.
        repository: ``owner/name``; ``None`` sends nothing.
        dry_run: list the files only.
        private: whether a repository that has to be made is private.

    Returns:
        What was sent, or would be.

    Raises:
        UserError: the hub does not answer, or does not take the files.
    """
    if repository is None:
        return {"repository": None, "is_dry_run": dry_run, "files": [], "num_bytes": 0, "url": None}
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    record: UploadRecord = {
        "repository": repository,
        "is_dry_run": dry_run,
        "files": [{"path": path.relative_to(folder).as_posix(), "num_bytes": path.stat().st_size} for path in paths],
        "num_bytes": sum(path.stat().st_size for path in paths),
        "url": None,
    }
    for file in record["files"]:
        logger.info("%14s bytes  %s", f"{file['num_bytes']:,}", file["path"])
    total = f"{count_of(len(paths), 'file')}, {record['num_bytes'] / 2**20:,.1f} MiB"
    _warn_of_local_base(folder)
    if dry_run:
        logger.info(
            "Dry run: these %s would go to %s on the hub. Nothing was sent. Send them with export.hub_dry_run = false.",
            total,
            repository,
        )
        return record
    record["url"] = _send(folder, repository, private=private)
    logger.info("Uploaded %s to %s.", total, record["url"])
    return record


def _send(folder: Path, repository: str, *, private: bool) -> str:
    import huggingface_hub

    kept = f"The export is whole in {folder}."
    if not hub_answers():
        raise UserError(
            f"The model hub does not answer, so nothing was uploaded to {repository}. {kept} Run again once there is a "
            "connection (HF_HUB_OFFLINE must not be set), or set export.hub_repository = null."
        )
    hub = huggingface_hub.HfApi()
    try:
        hub.create_repo(repository, private=private, exist_ok=True)
        sent = hub.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload by LM Tuning")
    except Interrupted:
        raise
    except Exception as error:  # whatever the client raises: without rights, without space, cut off
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(
            f"The model hub did not take the upload to {repository}: {reason} {kept} Log in with `hf auth login`, or "
            "set HF_TOKEN to a token that may write there."
        ) from error
    return str(sent.commit_url)


def _warn_of_local_base(folder: Path) -> None:
    path = folder / "adapter_config.json"
    if not path.is_file():
        return
    base = str(json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path"))
    if Path(base).is_absolute():
        logger.warning(
            "adapter_config.json names the base by a folder of this machine, %s, which nobody else has: export a "
            "merged model, or train on the base by its name on the hub.",
            base,
        )
