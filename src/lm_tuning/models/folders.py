"""Find model folders and say what is missing in them, without reading a weight."""

from __future__ import annotations

import math
from pathlib import Path

from lm_tuning.errors import UserError
from lm_tuning.models.config_values import check_config_values, count_largest_matrix, read_json_object

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
# An embedding that is so many times larger than all weights would be made up, and may not fit into memory.
_MOST_EXCESS = 4
# Pickles: reading one can run any code.
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
        UserError: there is no config or no safetensors, the config makes no model, a shard is missing or damaged, the
            index names something else than safetensors in the folder, or only pickled weights are there.
    """
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise UserError(
                f"{folder} holds an adapter, not a model. Point model.name_or_path at the model that it was trained on."
            )
        raise UserError(f"{folder} has no config.json, so it is not a model folder.")
    check_config_values(folder)
    # In the order of transformers, which takes the single file even where there is an index beside it.
    if (folder / "model.safetensors").is_file():
        return _check_headers([folder / "model.safetensors"])
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = read_weight_index(index)
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise UserError(f"{folder} lacks {len(missing)} of {len(names)} weight files, first {missing[0]}.")
        return _check_headers([folder / name for name in names])
    unsafe = sorted(path.name for pattern in UNSAFE_WEIGHT_PATTERNS for path in folder.glob(pattern))
    if unsafe:
        raise UserError(
            f"{folder} has its weights in {unsafe[0]} only. Such files can run code when they are read, so only "
            "safetensors are: save the model again with transformers' save_pretrained, or take a folder that has "
            f"{WEIGHT_FILES[0]}."
        )
    raise UserError(f"{folder} has no weights: looked for {' and '.join(WEIGHT_FILES)}.")


def read_weight_index(index: Path) -> list[str]:
    """Name the files that an index of weights leads to.

    transformers reads whatever file an index names, pickles and files elsewhere included, so that a name of a harmless
    kind would lead to code being run.

    Args:
        index: ``model.safetensors.index.json``.

    Returns:
        Names of safetensors files beside the index, sorted.

    Raises:
        UserError: the index is damaged, or names anything else.
    """
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} has no weight_map, which says in which file each weight lies. Copy it again.")
    names = sorted({str(name) for name in weight_map.values()})
    # With backslashes read as Windows does, so that a path out of the folder is none on any system.
    bad = [name for name in names if not name.endswith(".safetensors") or Path(name.replace("\\", "/")).name != name]
    if bad:
        raise UserError(
            f"{index} names {bad[0]!r}{f' and {len(bad) - 1} more' if len(bad) > 1 else ''}: only safetensors files in "
            "the same folder are read, since other files can run code. Save the model again with transformers' "
            "save_pretrained."
        )
    return names


def _check_headers(files: list[Path]) -> list[Path]:
    """Read the header of each file, which says whether it is safetensors and whole, and no weight."""
    from safetensors import SafetensorError, safe_open

    problems = []
    num_held = 0
    for file in files:
        try:
            # numpy, since shapes need no torch, and the header alone is read until a tensor is asked for.
            with safe_open(file, framework="np") as opened:
                num_held += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())
        except (SafetensorError, OSError) as error:
            problems.append(f"{file} is damaged or no safetensors file ({error}). Copy or download it again.")
    if problems:
        raise UserError(problems)
    wanted = count_largest_matrix(files[0].parent)
    if wanted is not None and wanted > _MOST_EXCESS * max(num_held, 1):
        raise UserError(
            f"{files[0].parent / 'config.json'} describes a matrix of {wanted:,} numbers, and the weight files "
            f"hold {num_held:,} in all: a size in it is wrong, or the files are another model's."
        )
    return files


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
    # Also those that only some tokenizers read: each of them may change what a text becomes.
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
