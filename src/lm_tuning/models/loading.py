"""Load tokenizers and causal language models from a folder or the hub, with errors that say the way out."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_tuning.errors import UserError
from lm_tuning.text.padding import choose_pad_token

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
TOKENIZER_SIDE_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
UNSAFE_WEIGHT_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
HUB_PROBE_SECONDS = 5.0
NUM_SHOWN = 3


def is_local(name_or_path: str) -> bool:
    """Tell a folder from a hub name: it exists, or it cannot be a hub name (``owner/name`` or ``name``).

    Args:
        name_or_path: ``model.name_or_path``.

    Returns:
        Whether to look on the disk only.
    """
    return Path(name_or_path).exists() or name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1


def load_tokenizer(name_or_path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load a fast tokenizer, ready for training: right padding and a pad token.

    Args:
        name_or_path: a local folder or a hub name.
        revision: branch, tag or commit on the hub.
        trust_remote_code: whether code that comes with the model may run.

    Returns:
        A transformers tokenizer with ``padding_side`` ``right`` and a pad token from ``choose_pad_token``.

    Raises:
        UserError: the folder or hub name cannot be read, or has no fast tokenizer.
    """
    from transformers import AutoTokenizer

    if is_local(name_or_path):
        check_tokenizer_files(existing_folder(name_or_path))
    with user_errors(name_or_path, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(
            name_or_path,
            revision=revision,
            trust_remote_code=trust_remote_code,
            **hub_options(name_or_path),
        )
    if not tokenizer.is_fast:
        raise UserError(
            f"The tokenizer of {name_or_path} has no fast version (tokenizer.json), whose character positions the "
            "loss masks are made from. Convert it once with transformers and save it into the model folder."
        )
    tokenizer.init_kwargs.pop("local_files_only", None)  # a fact of this moment; it would be saved with the tokenizer
    tokenizer.padding_side = "right"
    tokenizer.pad_token = choose_pad_token(tokenizer).token
    return tokenizer


def load_model(
    name_or_path: str,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    attention: str = "auto",
    trust_remote_code: bool = False,
    device: str = "cpu",
    pad_token_id: int | None = None,
) -> PreTrainedModel:
    """Load a causal language model from safetensors.

    Args:
        name_or_path: a local folder or a hub name.
        revision: branch, tag or commit on the hub.
        dtype: type of the weights: ``float32``, ``bfloat16`` or ``float16``.
        attention: ``auto`` (transformers chooses), ``sdpa``, ``eager`` or ``flash_attention_2``.
        trust_remote_code: whether code that comes with the model may run.
        device: where the weights go, for example ``cpu`` or ``cuda:0``.
        pad_token_id: id to pad with; ``None`` takes the one that ``load_tokenizer`` sets for this model.

    Returns:
        The model in evaluation mode, its pad id set in ``config`` and ``generation_config``.

    Raises:
        UserError: the model cannot be reached or read, lacks weights, or the attention is not available.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if is_local(name_or_path):
        check_weight_files(existing_folder(name_or_path))
    if pad_token_id is None:
        tokenizer = load_tokenizer(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
        pad_token_id = int(tokenizer.pad_token_id)
    with user_errors(name_or_path, "model"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name_or_path,
            revision=revision,
            dtype=getattr(torch, dtype),
            attn_implementation=None if attention == "auto" else attention,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            device_map=None if device == "cpu" else device,
            output_loading_info=True,
            **hub_options(name_or_path),
        )
    model, info = loaded
    _check_complete(name_or_path, info)
    num_embeddings = model.get_input_embeddings().weight.shape[0]
    if pad_token_id >= num_embeddings:
        raise UserError(
            f"The pad token of {name_or_path} has id {pad_token_id}, but the model embeds ids below {num_embeddings}. "
            "Set the tokenizer's pad_token to a token that the model knows."
        )
    model.config.pad_token_id = pad_token_id
    if model.generation_config is not None:
        model.generation_config.pad_token_id = pad_token_id
    return model.eval()  # type: ignore[no-any-return]


def build_skeleton(name_or_path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Build the modules of a causal language model without weights, which takes a fraction of a second.

    Args:
        name_or_path: a local folder or a hub name.
        revision: branch, tag or commit on the hub.
        trust_remote_code: whether code that comes with the model may run.

    Returns:
        The model on the ``meta`` device: names and shapes are those of the loaded one.

    Raises:
        UserError: the config cannot be reached or read.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    build: Any = AutoModelForCausalLM.from_config
    with user_errors(name_or_path, "model"):
        config = AutoConfig.from_pretrained(
            name_or_path, revision=revision, trust_remote_code=trust_remote_code, **hub_options(name_or_path)
        )
        with torch.device("meta"):
            return build(config, trust_remote_code=trust_remote_code)


def check_weight_files(folder: Path) -> list[Path]:
    """Name the weight files of a model folder.

    Args:
        folder: a local model folder.

    Returns:
        The safetensors files, sorted by name.

    Raises:
        UserError: there is no config or no safetensors, a shard is missing, or only pickled weights are there.
    """
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise UserError(
                f"{folder} holds an adapter, not a model. Point model.name_or_path at the model that it was trained on."
            )
        raise UserError(f"{folder} has no config.json, so it is not a model folder.")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise UserError(f"{folder} lacks {len(missing)} of {len(names)} weight files, first {missing[0]}.")
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    unsafe = sorted(path.name for pattern in UNSAFE_WEIGHT_PATTERNS for path in folder.glob(pattern))
    if unsafe:
        raise UserError(
            f"{folder} has its weights in {unsafe[0]} only. Such files can run code when they are read, so only "
            "safetensors are: save the model again with transformers' save_pretrained, or take a folder that has "
            f"{WEIGHT_FILES[0]}."
        )
    raise UserError(f"{folder} has no weights: looked for {' and '.join(WEIGHT_FILES)}.")


def check_tokenizer_files(folder: Path) -> list[Path]:
    """Name the tokenizer files of a model folder.

    Args:
        folder: a local model folder.

    Returns:
        Every file that decides what the tokenizer does, the chat template included, sorted by name.

    Raises:
        UserError: there is no tokenizer.
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            f"{folder} has no tokenizer: looked for {', '.join(TOKENIZER_FILES)}. Copy the tokenizer's files there, or "
            "point model.name_or_path at a folder or hub name that has them."
        )
    patterns = (*TOKENIZER_FILES, *TOKENIZER_SIDE_FILES)
    return sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file())


def existing_folder(name_or_path: str) -> Path:
    """Find a local model folder.

    Args:
        name_or_path: a path; ``~`` is the home folder.

    Returns:
        The folder.

    Raises:
        UserError: there is none.
    """
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"The model folder {name_or_path} does not exist. Set model.name_or_path to a folder that does, or to a "
            "hub name."
        )
    return folder


def hub_options(name_or_path: str) -> dict[str, Any]:
    """Keep to the cache when the hub does not answer, instead of waiting a minute for each file.

    Args:
        name_or_path: a local folder or a hub name.

    Returns:
        Options for ``from_pretrained`` and for the hub's client.
    """
    return {} if is_local(name_or_path) or hub_answers() else {"local_files_only": True}


def hub_answers() -> bool:
    """Ask the hub once, without retries.

    Returns:
        Whether it answered within a few seconds; ``False`` in offline mode (``HF_HUB_OFFLINE=1``).
    """
    import huggingface_hub
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        huggingface_hub.get_session().head(constants.ENDPOINT, timeout=HUB_PROBE_SECONDS)
    except Exception as error:  # whatever the client raises means that there is no answer
        logger.info("The model hub does not answer (%s); looking in the local cache only.", error)
        return False
    return True


@contextmanager
def transformers_bars_off() -> Iterator[None]:
    """Keep transformers' own bars for loading and saving out of ours."""
    from transformers.utils import logging

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
    """Turn what transformers and the hub's client raise into one problem with the ways out.

    Args:
        name_or_path: a local folder or a hub name.
        what: ``model`` or ``tokenizer``.

    Raises:
        UserError: the block raised one of the errors that a bad name, file or connection leads to.
    """
    from safetensors import SafetensorError

    # A download may take long, so the hub's bars stay.
    bars = transformers_bars_off() if is_local(name_or_path) else nullcontext()
    try:
        with bars:
            yield
    except SafetensorError as error:
        raise UserError(f"The weights of {name_or_path} are damaged ({error}). Copy or download them again.") from error
    except ImportError as error:
        raise UserError(f"The {what} {name_or_path} needs a package that is missing: {_first_line(error)}") from error
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise UserError(
                f"The {what} {name_or_path} comes with its own code. Read it, then set model.trust_remote_code: true."
            ) from error
        if is_local(name_or_path):
            raise UserError(f"The {what} in {name_or_path} cannot be read: {_first_line(error)}") from error
        raise UserError(_hub_problem(name_or_path, what, error)) from error


def _hub_problem(name_or_path: str, what: str, error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    causes = list(_causes(error))
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


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _check_complete(name_or_path: str, info: dict[str, Any]) -> None:
    """Refuse weights that transformers would fill up with random numbers."""
    missing = sorted(info.get("missing_keys") or ())
    mismatched = sorted(str(entry[0]) for entry in info.get("mismatched_keys") or ())
    if missing or mismatched:
        names = ", ".join([*missing, *mismatched][:NUM_SHOWN])
        raise UserError(
            f"The weights of {name_or_path} do not fit its config: {len(missing)} tensors missing, {len(mismatched)} "
            f"of another shape (first: {names}). They would be random, so the model is not used."
        )
