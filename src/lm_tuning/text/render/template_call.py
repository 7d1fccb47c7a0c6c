"""Call a chat template as transformers does, without what its call does again for every row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lm_tuning.errors import UserError
from lm_tuning.json_types import JsonObject
from lm_tuning.text.records import CharRange, Message, Tools
from lm_tuning.text.render.plain import RowRefused
from lm_tuning.text.render.template_bounds import check_template, read_template

REFUSED = "refused_by_template"

# Every template is given these, so they are no arguments of it.
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt"}


class TemplateCall:
    """Render conversations with a tokenizer's chat template."""

    def __init__(self, tokenizer: Any, arguments: JsonObject | None = None) -> None:
        """Compile the template and try it.

        Args:
            tokenizer: a transformers tokenizer with a chat template.
            arguments: further arguments of the template, by name.

        Raises:
            UserError: the template is no Jinja or does not come to an end, or it reads no such argument.
        """
        from transformers.utils import chat_template_utils

        check_template(tokenizer, {**tokenizer.special_tokens_map, **(arguments or {})})
        self.source: str = read_template(tokenizer)
        # Each variable costs time at every row, and few templates read any.
        names = tokenizer.special_tokens_map.items()
        self._variables: JsonObject = {name: token for name, token in names if name in self.source}
        self._render_any: Any = chat_template_utils.render_jinja_template
        compiler: Any = getattr(chat_template_utils, "_compile_jinja_template", None)
        self._compiled = compiler(self.source) if compiler else None
        if arguments:
            read = self._read_names() - {*tokenizer.special_tokens_map}
            _refuse_unread(arguments, read)
            self._variables |= arguments

    def _read_names(self) -> set[str]:
        """Return the names that the template reads and that neither a row nor Jinja gives it."""
        from jinja2 import Environment, meta

        # The library's own environment knows the tag that marks what is generated.
        environment: Any = self._compiled.environment if self._compiled else Environment(autoescape=True)
        names = meta.find_undeclared_variables(environment.parse(self.source))
        return names - {*environment.globals} - _GIVEN

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
            raise RowRefused(REFUSED, f"{error}{_hint(messages)}") from error
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


def attempt(call: Callable[..., str], messages: list[Message], tools: Tools | None, **how: bool) -> str:
    """Render one conversation; return nothing where the template refuses it.

    Args:
        call: renders with the template.
        messages: the conversation.
        tools: what it may call.
        **how: see ``TemplateCall``.
    """
    try:
        return call(messages, tools, **how)
    except RowRefused:
        return ""


def _refuse_unread(arguments: JsonObject, read: set[str]) -> None:
    unread = [name for name in arguments if name not in read]
    if unread:
        known = f"It reads {', '.join(sorted(read))}." if read else "It reads none at all."
        raise UserError(
            [
                f"tokenize.template_arguments.{name} = {arguments[name]!r}: the chat template of the model reads no "
                f"argument of this name, so it would have no effect. {known} Take it out, or give one of those."
                for name in unread
            ]
        )


def _hint(messages: list[Message]) -> str:
    """Name the turn that most templates without tools stumble over."""
    turn = next((turn for turn, message in enumerate(messages, 1) if "content" not in message), None)
    return f" (turn {turn} calls a tool and has no content, which the template does not know)" if turn else ""
