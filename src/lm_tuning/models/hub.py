"""Reach the model hub or do without it, and turn what goes wrong into one problem that says how to fix it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from lm_tuning.errors import Interrupted, UserError, causes_of
from lm_tuning.models.folders import is_local, read_weight_index

logger = logging.getLogger(__name__)

HUB_PROBE_SECONDS = 5.0


def may_download(name_or_path: str) -> bool:
    """Return whether files may be asked of the hub, rather than of the local cache alone.

    Without an answer from it, its client would wait a minute for each file. A local folder asks nobody.

    Args:
        name_or_path: a local folder or a hub name.
    """
    return is_local(name_or_path) or hub_answers()


def hub_answers() -> bool:
    """Ask the hub once, without retries.

    Returns:
        Whether it answered within a few seconds; ``False`` in offline mode (``HF_HUB_OFFLINE=1``).
    """
    import huggingface_hub
    from huggingface_hub import constants

    # Read at import by the client, so the variable itself may have changed since.
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        # By the client's session, so that proxies and certificates that were set up for it hold here too.
        huggingface_hub.get_session().head(constants.ENDPOINT, timeout=HUB_PROBE_SECONDS)
    except Exception as error:  # whatever the client raises means that there is no answer
        logger.info("The model hub does not answer (%s); looking in the local cache only.", error)
        return False
    return True


@contextmanager
def transformers_bars_off() -> Iterator[None]:
    """Keep transformers' own bars for loading and saving out of ours."""
    from transformers.utils import logging

    # Its functions are not typed.
    bars: Any = logging
    was_on = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            bars.enable_progress_bar()


@contextmanager
def user_errors(name_or_path: str, what: str) -> Iterator[None]:
    """Turn what transformers and the hub's client raise into one problem that says how to fix it.

    Args:
        name_or_path: a local folder or a hub name.
        what: ``model`` or ``tokenizer``.

    Raises:
        UserError: the block raised one of the errors that a bad name, file or connection leads to.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    # A download may take long, so the hub's bars stay.
    bars = transformers_bars_off() if is_local(name_or_path) else nullcontext()
    try:
        with bars:
            yield
    except StrictDataclassError as error:
        # Its first line has the key alone; the cause has key, value and what is allowed.
        reason = " ".join(str(error.__cause__ or error).split())
        raise UserError(f"config.json of {name_or_path} has a value that makes no model: {reason}") from error
    except SafetensorError as error:
        raise UserError(f"The weights of {name_or_path} are damaged ({error}). Copy or download them again.") from error
    except ImportError as error:
        raise UserError(f"The {what} {name_or_path} needs a package that is missing: {_first_line(error)}") from error
    # What transformers raises for names, files and settings; the hub's errors are OSErrors too.
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise UserError(
                f"The {what} {name_or_path} comes with its own code. Read it, then set model.trust_remote_code: true."
            ) from error
        if is_local(name_or_path):
            raise UserError(f"The {what} in {name_or_path} cannot be read: {_first_line(error)}") from error
        raise UserError(_hub_problem(name_or_path, what, error)) from error
    except Exception as error:
        # A file of the folder made a library stumble. Lack of memory is told elsewhere, with the sizes.
        if isinstance(error, UserError | Interrupted | MemoryError) or "OutOfMemory" in type(error).__name__:
            raise
        raise UserError(
            f"The {what} {'in' if is_local(name_or_path) else 'of'} {name_or_path} cannot be used: "
            f"{type(error).__name__}: {_first_line(error)}. Its files are damaged, or do not belong together."
        ) from error


def check_hub_weights(name: str, *, revision: str | None) -> None:
    """Look at the index of a hub model's weights before any is downloaded.

    Args:
        name: ``owner/name`` or ``name``.
        revision: branch, tag or commit.

    Raises:
        UserError: the index is damaged, or names anything else than safetensors files.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    with user_errors(name, "model"):
        try:
            index = hf_hub_download(
                name, "model.safetensors.index.json", revision=revision, local_files_only=not may_download(name)
            )
        # One file, or none: transformers says which.
        except EntryNotFoundError:
            return
    read_weight_index(Path(index))


def _hub_problem(name_or_path: str, what: str, error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    # transformers wraps what the client raised, which alone tells a closed model from a missing one.
    causes = list(causes_of(error, with_context=True))
    if any(isinstance(cause, GatedRepoError) for cause in causes):
        return (
            f"The {what} {name_or_path} is gated: accept its terms on the hub, then set HF_TOKEN or run "
            "`hf auth login`."
        )
    if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
        return (
            f"The hub has no {what} {name_or_path}, or it is private. Check model.name_or_path, and set HF_TOKEN for a "
            "private one. (There is no local folder of that name either.)"
        )
    if any(isinstance(cause, LocalEntryNotFoundError) for cause in causes):
        return (
            f"The {what} {name_or_path} is not in the local cache and the model hub cannot be reached. Connect to it "
            "(HF_HUB_OFFLINE must not be 1, HF_ENDPOINT names a mirror), or set model.name_or_path to a local folder; "
            "there is none of that name here."
        )
    return f"The {what} {name_or_path} cannot be loaded from the hub: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
