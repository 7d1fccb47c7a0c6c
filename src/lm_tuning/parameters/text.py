"""Parameters that turn rows into tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from lm_tuning.parameters.base import Count, FractionOrAll, ParameterGroup

#: What every chat template is given for each row, so that no argument may bear these names.
GIVEN_TO_TEMPLATES = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


def _refuse_taken_names(arguments: dict[str, Any]) -> dict[str, Any]:
    """Refuse arguments that would take the place of what a row is rendered from."""
    # apply_chat_template() would take the argument in place of the row, and render every row the same.
    taken = [name for name in arguments if name in GIVEN_TO_TEMPLATES]
    if taken:
        raise ValueError(
            f"{' and '.join(taken)} {'is' if len(taken) == 1 else 'are'} given to the template for each row, so no "
            "argument can have that name"
        )
    return arguments


# Any value, since a template may want a list or a mapping. What it makes of the value is seen
# when it is called.
TemplateArguments = Annotated[dict[str, Any], AfterValidator(_refuse_taken_names)]


class TokenizeParameters(ParameterGroup):
    """How long a row may be and which of its tokens are supervised."""

    max_length_tokens: Count = 512
    """Longest row, in tokens; memory grows with it, and attention's share of the time with its square. For seq2seq_lm
    the longest source."""

    max_target_tokens: Count = 128
    """Longest target, in tokens, for seq2seq_lm; without effect for other tasks."""

    truncation: Literal["truncate_prompt", "truncate_end", "drop", "error"] = "truncate_prompt"
    """What a longer row does: lose a part of its prompt, lose its end, be dropped, or stop the run. The text of a class
    and the source of seq2seq_lm give way as a prompt does; running text and targets always lose their end."""

    cut_prompt_at: Literal["middle", "end", "start"] = "middle"
    """Where truncate_prompt takes tokens out of a prompt. The fixed text of data.template and of the chat template
    stays, and the longest column or turn gives way first."""

    max_lost_fraction: FractionOrAll = 0.5
    """Largest share of the training rows' tokens, from 0 to 1, that the limits may cut or drop; more stops the run. 1
    lets everything pass."""

    loss_on: Literal["assistant", "completion", "all"] = "assistant"
    """Tokens that are learned by causal_lm: every assistant turn, only the last one, or everything."""

    on_altered_content: Literal["warn", "error"] = "warn"
    """What happens when the chat template changes or leaves out what a row says, such as its reasoning: warn counts the
    rows, error stops the run and names the first."""

    system_turn: Literal["keep", "merge_into_user"] = "keep"
    """What the chat template gets of a system turn: the turn itself, or its text before that of the next user turn, for
    templates that refuse or leave out system turns."""

    template_arguments: TemplateArguments = Field(default={})
    """Further arguments of the chat template, name to value, such as enable_thinking: false. A tuned model is evaluated
    with the same."""

    control_tokens: Literal["auto", "as_text", "keep", "drop", "error"] = "auto"
    """What happens to a control token, such as <|im_end|>, that is typed inside a row: as_text learns its letters, keep
    the token, drop leaves the row out, error stops the run; auto is as_text in turns and keep in running text."""
