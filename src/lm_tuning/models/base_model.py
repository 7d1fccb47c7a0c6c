"""Describe which base model a run starts from, precisely enough to reuse what was made from it."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from lm_tuning.errors import UserError
from lm_tuning.models.conversion import convert_embedded_model, is_embedded
from lm_tuning.models.folders import check_tokenizer_files, check_weight_files, existing_folder, is_local
from lm_tuning.models.hub import may_download, user_errors
from lm_tuning.models.record import BaseModelRecord
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.storage.digests import digest_file, digest_values

logger = logging.getLogger(__name__)

# Digests that are remembered take no time, and nobody wants to see a bar for them.
_QUIET_SECONDS = 1.0


def describe_base_model(
    name_or_path: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    digest_cache: Path | None = None,
    on_progress: OnProgress = ignore_progress,
) -> BaseModelRecord:
    """Pin the base model down, making the default one first if it is asked for and not there.

    A local folder is pinned by its files' digests, a hub model by its commit. No weights are loaded, and nothing of
    a hub model but its config is downloaded.

    Args:
        name_or_path: a local folder or a hub name.
        revision: branch, tag or commit on the hub; a folder has none.
        trust_remote_code: whether code that comes with the model may run.
        digest_cache: JSON file that remembers digests of unchanged files.
        on_progress: receives conversion steps and files read.

    Returns:
        ``name_or_path``, ``revision`` (a commit for hub models), ``digest`` (of config and weights),
        ``tokenizer_digest``, ``trust_remote_code``, ``is_embedded``.

    Raises:
        UserError: the model is not there or not whole; problems with weights and tokenizer come together.
    """
    embedded = is_embedded(name_or_path)
    if embedded:
        folder, reused = convert_embedded_model(
            Path(name_or_path).expanduser(), digest_cache=digest_cache, on_progress=on_progress
        )
        logger.info("Default model %s: %s", "reused" if reused else "converted to", folder)
    if is_local(name_or_path):
        if revision is not None:
            raise UserError(f"model.revision is {revision!r}, but {name_or_path} is a folder, which has no revisions.")
        folder = existing_folder(name_or_path)
        digest, tokenizer_digest = _digest_folder(folder, digest_cache, on_progress)
        # As it was typed, only with forward slashes: a relative path stays valid where the whole project moves to.
        name_or_path = folder.as_posix()
    else:
        # A commit fixes every file, so nothing has to be read to know that weights and tokenizer are the same.
        revision = digest = tokenizer_digest = find_commit(name_or_path, revision)
    return {
        "name_or_path": name_or_path,
        "revision": revision,
        "digest": digest,
        "tokenizer_digest": tokenizer_digest,
        "trust_remote_code": trust_remote_code,
        "is_embedded": embedded,
    }


def find_commit(name: str, revision: str | None) -> str:
    """Ask the hub, or the local cache when the hub does not answer, which commit a name stands for.

    Args:
        name: ``owner/name`` or ``name``.
        revision: branch, tag or commit; ``None`` is the main branch.

    Returns:
        The commit's hash.

    Raises:
        UserError: neither the hub nor the cache knows the model.
    """
    from huggingface_hub import hf_hub_download

    with user_errors(name, "model"):
        path = hf_hub_download(name, "config.json", revision=revision, local_files_only=not may_download(name))
    # The cache keeps the files of a commit in snapshots/<commit>/.
    return Path(path).parent.name


def _digest_folder(folder: Path, digest_cache: Path | None, on_progress: OnProgress) -> tuple[str, str]:
    """Return the digests of model and tokenizer, or all problems of both."""
    problems: list[str] = []
    checked: list[list[Path]] = []
    # Both are checked before either is refused, so that one run names everything that is missing.
    for check in (check_weight_files, check_tokenizer_files):
        try:
            checked.append(check(folder))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(problems)
    # The config is a part of the model: the same numbers under another activation are another one.
    weights, tokenizer = [folder / "config.json", *checked[0]], checked[1]
    files = [*weights, *tokenizer]
    digests = {}
    began = time.monotonic()
    is_shown = False
    for done, path in enumerate(files, 1):
        digests[path] = digest_file(path, digest_cache)
        if time.monotonic() - began > _QUIET_SECONDS:
            if not is_shown:
                on_progress("Checking model files", 0, len(files), "files")
                is_shown = True
            on_progress("Checking model files", done, len(files), "files")

    def together(group: list[Path]) -> str:
        # Names relative to the folder, so that a copy elsewhere is the same model, and swapped shards are not.
        return digest_values({path.relative_to(folder).as_posix(): digests[path] for path in group})

    return together(weights), together(tokenizer)
