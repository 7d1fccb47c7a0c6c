"""Find model folders and say what is missing in them, without reading a weight."""

from __future__ import annotations

import json
from pathlib import Path

from lm_tuning.errors import UserError

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


def is_local(name_or_path: str) -> bool:
    """Tell a folder from a hub name: it exists, or it cannot be a hub name (``owner/name`` or ``name``).

    Args:
        name_or_path: ``model.name_or_path``.

    Returns:
        Whether to look on the disk only.
    """
    return Path(name_or_path).exists() or name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1


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
