"""Call a chat template as transformers does, without what its call does anew for every row."""

from __future__ import annotations

from typing import Any

from lm_tuning.text.rendering import CharRange, Message, RowRefused, Tools


class TemplateCall:
    """Render conversations with a tokenizer's chat template."""

    def __init__(self, tokenizer: Any) -> None:
        """Compile the template.

        Args:
            tokenizer: a transformers tokenizer with a chat template.
        """
        from transformers.utils import chat_template_utils

        self.source: str = tokenizer.get_chat_template()
        # Each variable costs time at every row, and few templates read any.
        names = tokenizer.special_tokens_map.items()
        self._variables: dict[str, Any] = {name: token for name, token in names if name in self.source}
        self._render_any: Any = chat_template_utils.render_jinja_template
        compiler: Any = getattr(chat_template_utils, "_compile_jinja_template", None)
        self._compiled = compiler(self.source) if compiler else None

    def __call__(
        self,
        messages: list[Message],
        tools: Tools | None = None,
        *,
        is_plain: bool = False,
        add_generation_prompt: bool = False,
    ) -> str:
        """Render one conversation.

        Args:
            messages: the conversation.
            tools: what it may call.
            is_plain: whether its turns hold role and text and nothing else: transformers changes nothing in those, so
                its template is called directly.
            add_generation_prompt: whether to end with what invites an answer.

        Returns:
            The text.

        Raises:
            RowRefused: the template refuses the conversation.
        """
        try:
            if is_plain and self._compiled is not None:
                return str(
                    self._compiled.render(
                        messages=messages,
                        tools=tools,
                        documents=None,
                        add_generation_prompt=add_generation_prompt,
                        **self._variables,
                    )
                )
            rendered: Any = self._render_any(
                conversations=[messages],
                tools=tools,
                chat_template=self.source,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except Exception as error:  # a template is foreign code: it raises what it likes
            raise RowRefused("refused_by_template", f"{error}{_hint(messages)}") from error
        return str(rendered[0][0])

    def marked_ranges(self, messages: list[Message], tools: Tools | None = None) -> list[CharRange]:
        """Return the character ranges inside the template's generation markers.

        Args:
            messages: the conversation.
            tools: what it may call.
        """
        rendered: Any = self._render_any(
            conversations=[messages],
            tools=tools,
            chat_template=self.source,
            return_assistant_tokens_mask=True,
            **self._variables,
        )
        return [(int(start), int(end)) for start, end in rendered[1][0]]


def _hint(messages: list[Message]) -> str:
    """Name the turn that most templates without tools stumble over."""
    turn = next((turn for turn, message in enumerate(messages, 1) if "content" not in message), None)
    return f" (turn {turn} calls a tool and has no content, which the template does not know)" if turn else ""
