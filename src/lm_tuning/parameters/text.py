"""Parameters that turn rows into tokens."""

from __future__ import annotations

from typing import Literal

from lm_tuning.parameters.base import Count, ParameterGroup


class TokenizeParameters(ParameterGroup):
    """How long a row may be and which of its tokens are learned."""

    max_length_tokens: Count = 512
    """Longest row, in tokens; memory grows with it, and attention's share of the time with its square."""

    truncation: Literal["truncate_prompt", "truncate_end", "drop", "error"] = "truncate_prompt"
    """What a longer row does: lose the start of its prompt, lose its end, be dropped, or stop the run."""

    loss_on: Literal["assistant", "completion", "all"] = "assistant"
    """Tokens that are learned: every assistant turn, only the last one, or everything."""
