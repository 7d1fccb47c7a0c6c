"""Validation of all parameters at once, with messages a user can act on, the nearest known key among them."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from pydantic import ValidationError

from lm_tuning.errors import UserError
from lm_tuning.json_types import JsonObject
from lm_tuning.parameters.base import KeyPath, write_path, write_value
from lm_tuning.parameters.conflicts import Conflict, find_conflicts
from lm_tuning.parameters.groups import Parameters
from lm_tuning.parameters.schema import accepts, describe_allowed, find_entry, walk_keys
from lm_tuning.parameters.sources import Source, Sources
from lm_tuning.parameters.trainer_arguments import OWNED_BY_US

# Habits of other trainers that no spelling distance would find.
_HABITS = {
    "lr": "train.learning_rate",
    "epochs": "train.num_epochs",
    "steps": "train.max_steps",
    "batch": "train.effective_batch_rows",
    "batch_size": "train.effective_batch_rows",
    "micro_batch_size": "train.micro_batch_tokens",
    "max_length": "tokenize.max_length_tokens",
    "max_seq_length": "tokenize.max_length_tokens",
    "cutoff_len": "tokenize.max_length_tokens",
    "truncation_side": "tokenize.cut_prompt_at",
    "chat_template_kwargs": "tokenize.template_arguments",
    "enable_thinking": "tokenize.template_arguments",
    "packing": "train.batching",
    "rank": "train.lora.r",
    "lora_r": "train.lora.r",
    "lora_alpha": "train.lora.alpha",
    "lora_dropout": "train.lora.dropout",
    "lora_target": "train.lora.target_modules",
    "lora_target_modules": "train.lora.target_modules",
    "init_lora_weights": "train.lora.init",
    "finetuning_type": "train.method",
    "quantization_bit": "train.qlora.bits",
    "patience": "train.early_stopping_evals",
    "bf16": "train.precision",
    "fp16": "train.precision",
    "model_name": "model.name_or_path",
    "model_name_or_path": "model.name_or_path",
    "experiment_name": "tracking.experiment",
    "threads": "environment.num_threads",
    "val_size": "split.validation",
    "test_size": "split.test",
}
_MOVED = {
    ("evaluate", "max_new_tokens"): "evaluate.generation.max_new_tokens",
    ("evaluate", "num_beams"): "evaluate.generation.num_beams",
}
"""Keys of earlier versions, and where they have gone."""

_CLOSE_ENOUGH = 0.7
# A near miss in the same group is likelier than an equally near one elsewhere.
_SAME_GROUP_BONUS = 0.1


def suggest(path: Sequence[str]) -> str:
    """Describe what a user most likely meant by an unknown key.

    Args:
        path: the unknown key, part by part, such as ``("train", "max_length_tokens")``.

    Returns:
        A sentence that starts with a space, or nothing when no known key comes near.
    """
    path = tuple(path)
    name = path[-1]
    if path[0] == "train" and name in OWNED_BY_US:
        return f" {as_sentence(OWNED_BY_US[name])}"
    if path in _MOVED:
        return f" It is {_MOVED[path]} now."
    if name in _HABITS:
        return f" Did you mean {_HABITS[name]}?"
    best = max(walk_keys(), key=lambda item: _likeness(path, item[0]))[0]
    return f" Did you mean {'.'.join(best)}?" if _likeness(path, best) >= _CLOSE_ENOUGH else ""


def as_sentence(advice: str) -> str:
    """Turn a piece of advice into a sentence."""
    return f"{advice[0].upper()}{advice[1:]}."


def _likeness(path: tuple[str, ...], known: tuple[str, ...]) -> float:
    """Compare the last parts by spelling, and prefer the same group."""
    # The last part is what was mistyped; a wrong group is rarer, and its keys are known anyway.
    matcher = SequenceMatcher(None, path[-1].lower(), known[-1])
    return matcher.ratio() + _SAME_GROUP_BONUS * (path[:-1] == known[:-1])


def validate_parameters(raw: JsonObject, sources: Sources | None = None) -> Parameters:
    """Check parameters one by one and against each other.

    Args:
        raw: the merged parameters as plain values, by group and key.
        sources: where they were written; adds file and line to each message.

    Raises:
        UserError: with every problem, each naming the key, the value given and what is allowed.
    """
    repaired = copy.deepcopy(dict(raw))  # the loader keeps the groups, and wrong values are taken out below
    # Checks between groups run only when every value is valid alone. So take the wrong values out, letting their
    # defaults stand in, and check again: what is then wrong between the others is a problem of its own.
    wrong: dict[KeyPath, str] = {}
    first: ValidationError | None = None
    parameters: Parameters | None = None
    while parameters is None:
        try:
            parameters = Parameters.model_validate(repaired)
        except ValidationError as error:
            first = first or error
            found = _problems_of(error, repaired, sources)
            assert not found.keys() <= wrong.keys(), "a wrong value that was taken out is wrong no more"
            wrong |= found
            for path in found:
                _take_out(repaired, path)
    bad_keys = [".".join(map(str, path)) for path in wrong]
    conflicts = [item.problem for item in find_conflicts(parameters) if not _touches(item, bad_keys)]
    if wrong or conflicts:
        raise UserError([*wrong.values(), *conflicts]) from first
    return parameters


def _problems_of(error: ValidationError, raw: JsonObject, sources: Sources | None) -> dict[KeyPath, str]:
    """Describe the wrong values of one validation, one sentence for each key."""
    problems: dict[KeyPath, str] = {}
    for item in error.errors(include_url=False):
        unknown = item["type"] in {"extra_forbidden", "invalid_key"}
        # pydantic's locations hold the alternatives of unions, as tags with a #, which no user has typed.
        location = tuple(part for part in item["loc"] if not str(part).startswith("#"))
        path = location if unknown else _known_part(location)
        if path in problems:
            continue  # one alternative of a union each
        value = _value_at(raw, path)
        source = sources.find(path) if sources else None
        if unknown:
            text = _describe_unknown(path)
        elif item["type"] == "value_error":  # raised by a check of ours, in words for users
            text = f"{write_path(path)} = {write_value(value)}: {item['ctx']['error']}."
        else:
            text = _describe_wrong(path, value, source)
        problems[path] = f"{text} [{source.location}]" if source else text
    return problems


def _describe_unknown(path: KeyPath) -> str:
    """Return the sentence that there is no such key, and which one was meant."""
    parts = [str(part) for part in path]
    if parts[:2] == ["train", "trainer"] and parts[-1] in OWNED_BY_US:
        return f"{write_path(path)} is set by this project. {as_sentence(OWNED_BY_US[parts[-1]])}"
    # Where nothing comes near, the keys that there are say what the group is for.
    hint = suggest(parts)
    if not hint:
        group = find_entry(path[:-1]) or {}
        choices = group.get("anyOf", [group])
        keys = [key for choice in choices for key in choice.get("properties", {})]
        hint = f" Keys of {write_path(path[:-1]) or 'the top level'}: {', '.join(keys)}."
    return f"{write_path(path)}: there is no such key.{hint}"


def _describe_wrong(path: KeyPath, value: object, source: Source | None) -> str:
    """Describe what was given, what is allowed, and how text is written that YAML takes for something else."""
    entry = find_entry(path) or {}
    allowed = describe_allowed(entry) + (", not empty" if value in ("", []) else "")
    text = f"{write_path(path)} = {write_value(value)} ({_kind(value)}) is not allowed. It takes {allowed}."
    # no, 01 and 1e3 arrive as something else than was typed, and the message shows both.
    wants_text = accepts(entry, source.text) if source and source.text else accepts(entry, "text")
    if wants_text and isinstance(value, (bool, int, float)):
        written = source.text if source else None
        text += f" YAML reads {written or 'what is written'} as {_kind(value)}"
        text += f'; for a string put it in quotes: "{written or _guess(value)}".'
    elif isinstance(value, str) and _unquoted(value) is not value and accepts(entry, _unquoted(value)):
        text += " Leave the quotes out."
    return text


def _guess(value: bool | int | float) -> str:
    """Guess what a user wrote where YAML took it for something else."""
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _unquoted(value: str) -> object:
    """Read text as YAML would have read it without quotes; what YAML takes for text, such as nan, comes back."""
    words = {"true": True, "false": False, "null": None}
    if value.lower() in words:
        return words[value.lower()]
    for kind in (int, float):
        try:
            number = kind(value)
        except ValueError:
            continue
        # int() takes digits of every script, YAML those of ASCII.
        return number if value.isascii() and math.isfinite(number) else value
    return value


def _kind(value: object) -> str:
    """Name the type of a value as YAML's users think of it."""
    if value is None:
        return "nothing"
    for kinds, word in (
        (bool, "a boolean"),
        (int, "an integer"),
        (float, "a number"),
        (str, "a string"),
        (Mapping, "a mapping"),
        (Sequence, "a list"),
    ):
        if isinstance(value, kinds):
            return word
    return type(value).__name__


def _known_part(location: Sequence[str | int]) -> KeyPath:
    """Cut what pydantic adds to a path to tell the alternatives of a union apart."""
    path: KeyPath = ()
    for part in location:
        if find_entry((*path, part)) is None:
            break
        path = (*path, part)
    return path


def _value_at(raw: object, path: KeyPath) -> Any:
    """Return the value at a path, or None where a group above it is no group."""
    for part in path:
        try:
            raw = raw[part]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return None
    return raw


def _take_out(raw: JsonObject, path: KeyPath) -> None:
    """Remove the key of a path; a wrong item takes its whole list along."""
    assert path, "the parameters are a group, whatever is in it"
    for position, part in enumerate(path):
        if part not in raw:
            return  # taken out with something above it
        child = raw[part]
        if position == len(path) - 1 or not isinstance(child, dict):
            # Of a list the whole goes: without the wrong item another one would stand in its position.
            del raw[part]
            return
        raw = child


def _touches(conflict: Conflict, bad_keys: Sequence[str]) -> bool:
    """Return whether a conflict rests on a value that is already reported as wrong."""
    return any(key == bad or key.startswith(f"{bad}.") for key in conflict.keys for bad in bad_keys)
