"""How many positions a model has, and what does not fit into them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lm_tuning.errors import UserError

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
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _STRETCHED_ROPE:
        original = rope.get("original_max_position_embeddings") or limit
        limit = max(limit, int(original * float(rope.get("factor") or 1.0)))
    return limit


def find_positions(model: Any) -> Positions | None:
    """Read the positions off a model; ``None`` where its configuration names none.

    Args:
        model: with or without weights, as ``build_skeleton`` makes it.
    """
    limit = position_limit(model.config)
    if limit is None:
        return None
    are_learned = any(
        hasattr(module, "num_embeddings") and _is_position(name) for name, module in model.named_modules()
    )
    return Positions(limit, are_learned)


def _is_position(name: str) -> bool:
    last = name.rpartition(".")[2].lower()
    return last == "wpe" or "position" in last


def check_answer_room(config: Any, *, max_new_tokens: int) -> None:
    """Refuse answers that leave no room for a prompt in the positions of a model.

    The last token of an answer is not read again, so a decoder of its own has room for as many as its positions; a
    causal model reads one token of the prompt at least.

    Args:
        config: of transformers.
        max_new_tokens: ``evaluate.max_new_tokens``.

    Raises:
        UserError: they do not fit.
    """
    limit = position_limit(config)
    if limit is None:
        return
    reads_apart = bool(getattr(config, "is_encoder_decoder", False))
    most = limit if reads_apart else limit - 1
    if max_new_tokens <= most:
        return
    why = "" if reads_apart else ", which prompt and answer share, so that no prompt fits beside it"
    way = f"at most {most}" if reads_apart else f"at most {limit // 2}, which leaves half of them to the prompt"
    raise UserError(
        f"evaluate.max_new_tokens = {max_new_tokens} is too long an answer: the model ({config.model_type}) has "
        f"{limit} positions{why}. Set evaluate.max_new_tokens to {way}, or evaluate.num_generate_rows = 0 to measure "
        "without answers."
    )
