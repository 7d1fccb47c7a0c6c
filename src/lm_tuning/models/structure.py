"""What a model is made of: its backbone, its head, and how many positions it has."""

from __future__ import annotations

import functools
import inspect
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lm_tuning.errors import UserError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# By task, the class of transformers that loads a model for it. peft calls its own ``AutoPeftModelFor…``.
AUTO_CLASSES = {
    "causal_lm": "AutoModelForCausalLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
}
# Name of the head in every causal classifier of transformers.
HEAD = "score"
# Standard deviation of new weights where a config has none, as in most of transformers.
_USUAL_SPREAD = 0.02


def stored_labels(config: Any) -> dict[str, int] | None:
    """Return the label map of a config that belongs to a classifier, or None.

    Args:
        config: of a model folder.
    """
    # Every config has a label2id, two made-up classes if nothing else, so the architecture has to tell.
    architectures = getattr(config, "architectures", None) or []
    if not any(name.endswith("ForSequenceClassification") for name in architectures):
        return None
    return {str(name): int(index) for name, index in config.label2id.items()}


def write_labels(config: Any, label_map: dict[str, int] | None, name_or_path: str) -> bool:
    """Write a label map into a config.

    Args:
        config: of the model; it is changed.
        label_map: id of each class by its name; ``None`` keeps the classes that the model was trained for.
        name_or_path: what the model is called in messages.

    Returns:
        Whether a stored head was trained for exactly these labels.

    Raises:
        UserError: no labels are given, and the model has no head of its own.
    """
    stored = stored_labels(config)
    if label_map is None:
        if stored is None:
            raise UserError(
                f"{name_or_path} has no classification head, so its classes must be given: it is a base model, not one "
                "that was trained with task = sequence_classification."
            )
        label_map = stored
    assert sorted(label_map.values()) == list(range(len(label_map))), "class ids count up from 0"
    config.num_labels = len(label_map)
    config.id2label = {index: name for name, index in sorted(label_map.items(), key=lambda item: item[1])}
    config.label2id = dict(label_map)
    config.problem_type = "single_label_classification"
    if stored is not None and stored != label_map:
        logger.warning(
            "%s has a classification head for other classes (%d: %s). The data has %d, so the head is a new one.",
            name_or_path,
            len(stored),
            _first(stored),
            len(label_map),
        )
    return stored == label_map


def check_head(model: Any, name_or_path: str) -> None:
    """Refuse a classifier whose head is not a linear layer on a causal backbone.

    Raises:
        UserError: the architecture has another kind of head.
    """
    import torch

    if not isinstance(getattr(model, HEAD, None), torch.nn.Linear):
        raise UserError(
            f"task = sequence_classification puts a head on a causal language model, and {name_or_path} is a "
            f"{type(model).__name__}, which has none of that kind. Take a decoder such as Llama, Qwen3 or GPT-NeoX."
        )


def settle_head(model: Any, *, is_fresh: bool, was_stored: bool) -> None:
    """Draw a new head where a stored one belongs to other classes, and hold it in float32.

    Args:
        model: a loaded classifier.
        is_fresh: whether its head is new; noted as ``model.lm_tuning_fresh_head``.
        was_stored: whether the folder's weights had a head, which is then in the place of the new one.
    """
    head = getattr(model, HEAD)
    if is_fresh and was_stored:
        # Not by the model's own initialization, which passes over weights that were read from a file.
        spread = getattr(model.config.get_text_config(), "initializer_range", _USUAL_SPREAD)
        head.weight.data.normal_(mean=0.0, std=spread)
    # A few thousand numbers: float32 costs nothing, and in 16 bits small updates of them would round to nothing. Hidden
    # states in 16 bits become float32 on the way in, so that the model runs with and without autocast.
    head.float()
    head.register_forward_pre_hook(_take_own_type)
    model.lm_tuning_fresh_head = is_fresh


def _take_own_type(head: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden, *others = arguments  # (batch, sequence, width) or, of chosen positions, (rows, width)
    return (hidden.to(head.weight.dtype), *others)


def _first(label_map: dict[str, int]) -> str:
    names = list(label_map)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


_STRETCHED_ROPE = {"linear", "dynamic", "yarn"}


@dataclass(frozen=True)
class Positions:
    """How long a row the model can take.

    Attributes:
        limit: tokens.
        are_learned: whether each position has a weight of its own, so that there is nothing beyond the limit.
    """

    limit: int
    are_learned: bool


def position_limit(config: Any) -> int | None:
    """Read the most positions off a model's configuration, those of a stretched rotary embedding included.

    Args:
        config: of transformers.

    Returns:
        Tokens; ``None`` where the configuration names none.
    """
    config = getattr(config, "text_config", None) or config
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        return None
    # Of these kinds the config may name the positions before stretching; of others, such as llama3, those after it.
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _STRETCHED_ROPE:
        original = rope.get("original_max_position_embeddings") or limit
        limit = max(limit, int(original * float(rope.get("factor") or 1.0)))
    return limit


def longest_text(tokenizer: Any) -> int | None:
    """Return how many tokens a tokenizer's files allow a text; ``None`` where they do not say.

    Args:
        tokenizer: of transformers.
    """
    # Where they do not, transformers gives about 1e30.
    return tokenizer.model_max_length if tokenizer.model_max_length < 10**12 else None


def find_positions(model: Any) -> Positions | None:
    """Read the positions off a model; ``None`` where its configuration names none.

    Args:
        model: with or without weights, as ``build_skeleton`` makes it.
    """
    limit = position_limit(model.config)
    if limit is None:
        return None
    # Rotary embeddings have no table, and the table of tokens has another name.
    are_learned = any(
        hasattr(module, "num_embeddings") and _is_position(name) for name, module in model.named_modules()
    )
    return Positions(limit, are_learned)


def _is_position(name: str) -> bool:
    last = name.rpartition(".")[2].lower()
    return last == "wpe" or "position" in last


def check_answer_room(
    config: Any,
    *,
    max_new_tokens: int,
    key: str = "evaluate.generation.max_new_tokens",
    instead: str = "evaluate.num_generate_rows = 0 to measure without answers",
) -> None:
    """Refuse answers that leave no room for a prompt in the positions of a model.

    Args:
        config: of transformers.
        max_new_tokens: longest answer.
        key: the parameter that says so.
        instead: what else a user may do; empty for nothing.

    Raises:
        UserError: they do not fit.
    """
    limit = position_limit(config)
    if limit is None:
        return
    reads_apart = has_encoder(config)
    # The last token of an answer is not read again, so a decoder of its own has room for as many as its positions; a
    # causal model reads one token of the prompt at least.
    most = limit if reads_apart else limit - 1
    if max_new_tokens <= most:
        return
    why = "" if reads_apart else ", which prompt and answer share, so that no prompt fits beside it"
    way = f"at most {most}" if reads_apart else f"at most {limit // 2}, which leaves half of them to the prompt"
    raise UserError(
        f"{key} = {max_new_tokens} is too long an answer: the model ({config.model_type}) has {limit} positions{why}. "
        f"Set {key} to {way}{', or ' * bool(instead)}{instead}."
    )


def has_encoder(config: Any) -> bool:
    """Return whether a model reads its prompt with an encoder, apart from the answer.

    Args:
        config: of transformers.
    """
    return bool(getattr(config, "is_encoder_decoder", False))


def keeps_logits(model: Any) -> bool:
    """Return whether the model's forward can compute the logits of chosen positions alone."""
    model_class: Any = type(inner_model(model))
    return _forward_keeps_logits(model_class)


# Once per class, since this is asked for every micro-batch.
@functools.cache
def _forward_keeps_logits(model_class: Any) -> bool:
    """Return whether the forward pass of a class can compute the logits of chosen positions alone."""
    return "logits_to_keep" in inspect.signature(model_class.forward).parameters


def classification_head(model: Any) -> torch.nn.Module:
    """Return the head that turns hidden states into class logits."""
    head: torch.nn.Module = classifier_parts(model)[1]
    return head


def inner_model(model: Any) -> Any:
    """Return the model itself, out of the wrapper that holds its adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def backbone_of(model: Any) -> Any:
    """Return the part of a model that ends with hidden states; adapters sit inside it."""
    inner = inner_model(model)
    return getattr(inner, inner.base_model_prefix)


def classifier_parts(model: Any) -> tuple[Any, Any]:
    """Return the backbone and the head of a classifier; adapters sit inside both."""
    return backbone_of(model), inner_model(model).score
