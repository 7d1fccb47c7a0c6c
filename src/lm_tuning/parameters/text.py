"""Parameters that turn rows into tokens."""

from __future__ import annotations

from typing import Literal

from lm_tuning.parameters.base import Count, FractionOrAll, ParameterGroup


class TokenizeParameters(ParameterGroup):
    """How long a row may be and which of its tokens are learned."""

    max_length_tokens: Count = 512
    """Longest row, in tokens; memory grows with it, and attention's share of the time with its square. For seq2seq_lm
    the longest source."""

    max_target_tokens: Count = 128
    """Longest target, in tokens, for seq2seq_lm; without effect for other tasks."""

    truncation: Literal["truncate_prompt", "truncate_end", "drop", "error"] = "truncate_prompt"
    """What a longer row does: lose the start of its prompt, lose its end, be dropped, or stop the run. Texts with a
    class, sources and targets have no prompt to give way, so both ways to truncate cut their end."""

    max_lost_fraction: FractionOrAll = 0.5
    """Largest share of the training rows' tokens, from 0 to 1, that the limits may cut or drop; more stops the run. 1
    lets everything pass."""

    loss_on: Literal["assistant", "completion", "all"] = "assistant"
    """Tokens that are learned by causal_lm: every assistant turn, only the last one, or everything."""

    on_altered_content: Literal["warn", "error"] = "warn"
    """What happens when the chat template changes what a row says, such as trimming it: warn counts the rows, error
    stops the run and names the first."""

    control_tokens: Literal["auto", "as_text", "keep", "drop", "error"] = "auto"
    """What happens to a control token, such as <|im_end|>, that is typed inside a row: as_text learns its letters, keep
    the token, drop leaves the row out, error stops the run; auto is as_text in turns and keep in running text."""
