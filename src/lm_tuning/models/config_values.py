"""Look at the numbers in a model's ``config.json`` before anything is built from them.

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
