"""Find model folders and say what is wrong with them, without reading a weight.

A config with no heads or a size in words ends in an error from deep inside a library, or in minutes of silence while
a model of a million layers is built. Here each value is named with its key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeGuard

from lm_tuning.errors import UserError
from lm_tuning.json_types import JsonObject, JsonValue

_MAX_LAYERS = 1_000
_MAX_SIZE = 100_000_000
# Names of the same quantity in the architectures of transformers.
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", "decoder_attention_heads")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "n_embed")
# What the second side of a model's large matrices is called, beside its width.
_HEIGHTS = ("vocab_size", "intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff")
_SIZES = (
    *_WIDTHS,
    *_HEIGHTS,
    "head_dim",
    "d_kv",
    "num_key_value_heads",
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
)
_SHARES = (
    *("attention_dropout", "hidden_dropout", "dropout", "activation_dropout", "classifier_dropout", "dropout_rate"),
    # Names from GPT-2 and from BERT for the same quantities.
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob"),
)
_NULL_MEANS_DEFAULT = {"head_dim", "num_key_value_heads", "n_inner"}
_ROPE = ("rope_parameters", "rope_scaling")
_MAX_STRETCH = 100_000
_GROUPS = ("text_config", "encoder", "decoder")
_SHOWN_CHARACTERS = 200
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def check_config_values(folder: Path) -> None:
    """Refuse a config whose sizes make no model.

    Args:
        folder: a local model folder.

    Raises:
        UserError: with every wrong value, each with file, key and what is allowed; or the file is no JSON object.
    """
    path, generation = folder / "config.json", folder / "generation_config.json"
    config = read_json_object(path)
    problems = [f"{path}: {problem}" for problem in _problems_of(config, "")]
    if generation.is_file():
        # generation_config.json has no vocabulary of its own; a model of text and images has the text's one group down.
        sizes = [size for size in map(_vocabulary_of, (config, config.get("text_config"))) if size is not None]
        found = _token_id_problems(read_json_object(generation), "", max(sizes, default=None))
        problems += [f"{generation}: {problem}" for problem in found]
    if problems:
        raise UserError(problems)


def count_largest_matrix(folder: Path) -> int | None:
    """Return how many numbers the largest matrix has that a config describes, ``None`` where it does not say.

    Args:
        folder: a local model folder whose config has passed :func:`check_config_values`.
    """
    config = read_json_object(folder / "config.json")
    text_config = config.get("text_config")
    values = text_config if isinstance(text_config, dict) else config
    widths, heights = (
        [value for key in keys if isinstance(value := values.get(key), int)] for keys in (_WIDTHS, _HEIGHTS)
    )
    return max(heights) * widths[0] if heights and widths else None


def read_json_object(path: Path) -> JsonObject:
    """Read a file of a model folder that must be one JSON object.

    Args:
        path: the file.

    Raises:
        UserError: it is damaged, or something else than an object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    except RecursionError as error:
        raise UserError(f"{path} is nested too deeply to be read.") from error
    except ValueError as error:
        raise UserError(f"{path} is damaged: it is no JSON ({error}). Copy or download it again.") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no JSON object but a {type(values).__name__}. Copy or download it again.")
    return values


def _problems_of(config: JsonObject, prefix: str) -> Iterator[str]:
    limits = [(key, _MAX_LAYERS) for key in _LAYERS] + [(key, _MAX_SIZE) for key in (*_HEADS, *_SIZES)]
    wrong: set[str] = set()
    for key, most in limits:
        value = config.get(key)
        if key not in config or (value is None and key in _NULL_MEANS_DEFAULT):
            continue
        if isinstance(value, list) and value and all(_is_count(item, most) for item in value):
            continue  # some architectures have a size for each layer
        if not _is_count(value, most):
            wrong.add(key)
            yield f"{prefix}{key} = {_show(value)}, and it takes an integer from 1 to {most:,}."
    for key, value in config.items():
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{prefix}{key} = {value}, which is no finite number."
    for key in _SHARES:
        value = config.get(key)
        if value is not None and not (_is_number(value) and 0 <= value <= 1):
            yield f"{prefix}{key} = {_show(value)}, and it takes a number from 0 to 1."
    if "architectures" in config and not _are_names(config["architectures"]):
        yield f"{prefix}architectures = {_show(config['architectures'])}, and it takes a list of class names."
    yield from _rope_problems(config, prefix)
    yield from _shape_problems(config, prefix, wrong)
    yield from _token_id_problems(config, prefix, _vocabulary_of(config))
    for group in _GROUPS:
        inner = config.get(group)
        if isinstance(inner, dict):
            yield from _problems_of(inner, f"{prefix}{group}.")


def _shape_problems(config: JsonObject, prefix: str, wrong: set[str]) -> Iterator[str]:
    """Compare widths and heads, where each is a number for itself."""

    def first(keys: Sequence[str]) -> tuple[str, int] | None:
        known = ((key, value) for key in keys if isinstance(value := config.get(key), int) and key not in wrong)
        return next(known, None)

    width, heads = first(_WIDTHS), first(_HEADS)
    if heads is None:
        return
    # Where a head says how wide it is, the heads together need not be as wide as the model.
    has_own_width = config.get("head_dim") is not None or config.get("d_kv") is not None
    if width is not None and not has_own_width and width[1] % heads[1]:
        yield (
            f"{prefix}{width[0]} = {width[1]} cannot be divided evenly among {prefix}{heads[0]} = {heads[1]} "
            "heads, and there is no head_dim."
        )
    groups = first(["num_key_value_heads"])
    if groups is not None and heads[1] % groups[1]:
        yield f"{prefix}{heads[0]} = {heads[1]} is no multiple of {prefix}{groups[0]} = {groups[1]}."


def _rope_problems(config: JsonObject, prefix: str) -> Iterator[str]:
    for group in _ROPE:
        rope = config.get(group)
        factor = rope.get("factor", 1.0) if isinstance(rope, dict) else 1.0
        if not (_is_number(factor) and 0 < factor <= _MAX_STRETCH):
            yield f"{prefix}{group}.factor = {_show(factor)}, and it takes a number above 0, up to {_MAX_STRETCH}."


def _token_id_problems(config: JsonObject, prefix: str, num_tokens: int | None) -> Iterator[str]:
    """Check the ids of special tokens; ``num_tokens`` has the vocabulary with its padded part, where it is known.

    Only PAD must lie in the vocabulary, since embeddings are built around it. Small models of one's own often keep the
    BOS and EOS of the architecture they were derived from, and work by their tokenizer's.
    """
    for key in _TOKEN_IDS:
        value = config.get(key)
        if value is None:
            continue
        most = (num_tokens if key == "pad_token_id" and num_tokens else _MAX_SIZE) - 1
        ids = value if isinstance(value, list) and key == "eos_token_id" else [value]
        # Published models have -1 for a token that they do not have.
        if not ids or not all(_is_integer(each) and -1 <= each <= most for each in ids):
            several = ", a list of them" if key == "eos_token_id" else ""
            yield f"{prefix}{key} = {_show(value)}, and it takes an integer from 0 to {most:,}{several}, -1 or null."


def _vocabulary_of(config: JsonValue) -> int | None:
    size = config.get("vocab_size") if isinstance(config, dict) else None
    return size if _is_count(size, _MAX_SIZE) else None


def _is_count(value: JsonValue, most: int) -> TypeGuard[int]:
    return _is_integer(value) and 1 <= value <= most


def _is_number(value: JsonValue) -> TypeGuard[int | float]:
    return _is_integer(value) or isinstance(value, float)


def _is_integer(value: JsonValue) -> TypeGuard[int]:
    # Python counts true and false among the integers, and JSON does not.
    return isinstance(value, int) and not isinstance(value, bool)


def _show(value: JsonValue) -> str:
    """Write a value as JSON, and of a long one its beginning."""
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} …"


def _are_names(value: JsonValue) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(item, str) for item in value))


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
