"""Look at the numbers in a model's ``config.json`` before anything is built from them.

A config with no heads or a size in words ends in an error from deep inside a library, or in minutes of silence while
a model of a million layers is built. Here each value is named with its key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from lm_tuning.errors import UserError

_MAX_LAYERS = 1_000
_MAX_SIZE = 100_000_000
# Names of the same quantity in the architectures of transformers.
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", "decoder_attention_heads")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "n_embed")
_SIZES = (
    *_WIDTHS,
    "vocab_size",
    "intermediate_size",
    "ffn_dim",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "d_ff",
    "head_dim",
    "d_kv",
    "num_key_value_heads",
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
)
_SHARES = (
    *(
        "attention_dropout",
        "hidden_dropout",
        "dropout",
        "activation_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
    ),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "dropout_rate"),
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
        groups: list[Any] = [config, config.get("text_config")]
        sizes = [int(each["vocab_size"]) for each in groups if _has_vocabulary(each)]
        found = _token_id_problems(read_json_object(generation), "", max(sizes) if sizes else None)
        problems += [f"{generation}: {problem}" for problem in found]
    if problems:
        raise UserError(problems)


def count_largest_matrix(folder: Path) -> int | None:
    """Return how many numbers the largest matrix has that a config describes, ``None`` where it does not say.

    Args:
        folder: a local model folder whose config has passed :func:`check_config_values`.
    """
    config = read_json_object(folder / "config.json")
    values = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    assert isinstance(values, dict), "one of two mappings"
    width = next((values[key] for key in _WIDTHS if isinstance(values.get(key), int)), None)
    wide = (*_SIZES[len(_WIDTHS) : _SIZES.index("head_dim")],)
    rows = [values[key] for key in wide if isinstance(values.get(key), int)]
    return max(rows) * width if rows and width is not None else None


def read_json_object(path: Path) -> dict[str, Any]:
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


def _problems_of(config: Mapping[str, Any], prefix: str) -> Iterator[str]:
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
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1):
            yield f"{prefix}{key} = {_show(value)}, and it takes a number from 0 to 1."
    if "architectures" in config and not _are_names(config["architectures"]):
        yield f"{prefix}architectures = {_show(config['architectures'])}, and it takes a list of class names."
    yield from _rope_problems(config, prefix)
    yield from _shape_problems(config, prefix, wrong)
    yield from _token_id_problems(config, prefix, config["vocab_size"] if _has_vocabulary(config) else None)
    for group in _GROUPS:
        if isinstance(config.get(group), Mapping):
            yield from _problems_of(config[group], f"{prefix}{group}.")


def _shape_problems(config: Mapping[str, Any], prefix: str, wrong: set[str]) -> Iterator[str]:
    """Compare widths and heads, where each is a number for itself."""
    width = next((key for key in _WIDTHS if isinstance(config.get(key), int) and key not in wrong), None)
    heads = next((key for key in _HEADS if isinstance(config.get(key), int) and key not in wrong), None)
    if heads is None:
        return
    has_own_width = config.get("head_dim") is not None or config.get("d_kv") is not None
    if width is not None and not has_own_width and config[width] % config[heads]:
        yield (
            f"{prefix}{width} = {config[width]} cannot be divided evenly among {prefix}{heads} = {config[heads]} "
            "heads, and there is no head_dim."
        )
    groups = config.get("num_key_value_heads")
    if isinstance(groups, int) and "num_key_value_heads" not in wrong and config[heads] % groups:
        yield f"{prefix}{heads} = {config[heads]} is no multiple of {prefix}num_key_value_heads = {groups}."


def _rope_problems(config: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for group in _ROPE:
        if isinstance(config.get(group), Mapping):
            factor = config[group].get("factor", 1.0)
            if not (_is_integer(factor) or isinstance(factor, float)) or not 0 < factor <= _MAX_STRETCH:
                yield f"{prefix}{group}.factor = {_show(factor)}, and it takes a number above 0, up to {_MAX_STRETCH}."


def _token_id_problems(config: Mapping[str, Any], prefix: str, num_tokens: int | None) -> Iterator[str]:
    """Check the ids of special tokens; ``num_tokens`` has the vocabulary with its padded part, where it is known.

    Only PAD must lie in the vocabulary, since embeddings are built around it. Small models of one's own often keep the
    BOS and EOS of the architecture they were derived from, and work by their tokenizer's.
    """
    for key in _TOKEN_IDS:
        value = config.get(key)
        if value is None:
            continue
        most = (num_tokens if key == "pad_token_id" and num_tokens else _MAX_SIZE) - 1
        are_several = isinstance(value, list) and key == "eos_token_id"
        ids = value if are_several else [value]
        # Published models have -1 for a token that they do not have.
        if not ids or not all(_is_integer(each) and -1 <= each <= most for each in ids):
            several = ", a list of them" if key == "eos_token_id" else ""
            yield f"{prefix}{key} = {_show(value)}, and it takes an integer from 0 to {most:,}{several}, -1 or null."


def _has_vocabulary(config: object) -> bool:
    return isinstance(config, Mapping) and _is_count(config.get("vocab_size"), _MAX_SIZE)


def _is_count(value: object, most: int) -> bool:
    return _is_integer(value) and 1 <= value <= most


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _show(value: object) -> str:
    """Write a value as JSON, and of a long one its beginning."""
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} …"


def _are_names(value: object) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(item, str) for item in value))
