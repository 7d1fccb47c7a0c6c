"""Call a chat template as transformers does, after trying it: foreign code that does not compile or end is named.

Jinja has no endless loop, but loops over long ranges inside each other, growing texts and powers come to the same. They
are counted rather than timed, so that the same template is refused on every machine. A call leaves out what that of
transformers does again for every row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from lm_tuning.errors import UserError
from lm_tuning.json_types import JsonObject, JsonValue
from lm_tuning.text.records import CharRange, Message, Tools
from lm_tuning.text.render.plain import RowRefused

MAX_LINES = 100_000
"""Lines of Python that one rendering of a short conversation may run; real templates run hundreds or thousands."""

MAX_CHARACTERS = 1_000_000
"""Length of a text or list, and digits of a number, that may come up in it."""

_FIX = "Take a repaired version of the model, or put a working chat_template.jinja into its folder."

_CALL: JsonObject = {"type": "function", "id": "c0", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
_TOOLS: Tools = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
        },
    }
]
_PLAIN: list[Message] = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
_SYSTEM: list[Message] = [{"role": "system", "content": "You add."}, *_PLAIN, *_PLAIN]
_WITH_CALL: list[Message] = [
    _PLAIN[0],
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "name": "add", "tool_call_id": "c0", "content": "4"},
    _PLAIN[1],
]
_PROBES: list[tuple[list[Message], Tools | None, bool]] = [
    (_PLAIN, None, False),
    (_PLAIN[:1], None, True),
    (_SYSTEM, None, False),
    (_WITH_CALL, _TOOLS, False),
]


class _TooMuch(BaseException):
    """A bound is passed. No ``Exception``, so that neither a filter nor the template engine takes it for its own."""


def read_template(tokenizer: Any) -> str:
    """Return the text of a tokenizer's chat template.

    Args:
        tokenizer: a transformers tokenizer with a chat template.

    Raises:
        UserError: it has several, and none of them is the default one.
    """
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{describe_origin(tokenizer)} cannot be chosen: {reason.rstrip('.')}. {_FIX}") from error


def check_template(tokenizer: Any, variables: Mapping[str, JsonValue]) -> None:
    """Compile a tokenizer's chat template and render short conversations with it, within bounds.

    What the template refuses of them, a role or tools, is no fault: it may not be meant for these.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        variables: what the template gets beside the conversation, by name.

    Raises:
        UserError: the template is no Jinja, or renders no short conversation within the bounds; with the model's folder
            and the file that the template comes from.
    """
    from transformers.utils import chat_template_utils

    where = describe_origin(tokenizer)
    source = read_template(tokenizer)
    compiler = getattr(chat_template_utils, "_compile_jinja_template", None)
    if compiler is None:
        return
    environment = compiler("").environment.overlay()
    # Before the library compiles the template: what is constant in it is computed by that already.
    environment.intercepted_binops = frozenset({"*", "**"})
    environment.call_binop = _bounded(environment.call_binop)
    try:
        template = environment.from_string(source)
    except Exception as error:  # the compiler runs constant parts of foreign code
        raise UserError(_describe_fault(where, error)) from error
    for messages, tools, add_generation_prompt in _PROBES:
        given = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            _render_counted(partial(template.render, {**variables, **given, "documents": None}))
        except _TooMuch as error:
            raise UserError(_refusal(where, str(error))) from error
        except MemoryError as error:
            raise UserError(_refusal(where, "a short conversation takes more memory than there is")) from error
        except Exception:  # noqa: S112 - a role or tools that the template does not know; rows are told when they come
            continue


def _render_counted(render: Callable[[], str]) -> str:
    """Render, and stop it at too many lines or too long a text; what else traces this thread goes on afterwards.

    It is switched within one function, so that a tracer which counts calls and returns sees as many of both.

    Raises:
        _TooMuch: a bound is passed.
    """
    num_lines = 0

    def trace_line(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal num_lines
        if event == "line":
            num_lines += 1
            if num_lines > MAX_LINES:
                raise _TooMuch(f"a short conversation takes more than {MAX_LINES:,} steps, so it may never end")
            if frame.f_code.co_filename == "<template>":
                _check_values(frame.f_locals.values())
        return trace_line

    before = sys.gettrace()
    sys.settrace(trace_line)
    try:
        text = render()
    finally:
        sys.settrace(before)
    if len(text) > MAX_CHARACTERS:
        raise _TooMuch(_describe_length(len(text)))
    return text


def _check_values(values: Iterable[object]) -> None:
    """Look at the texts that a template holds, in its variables and namespaces."""
    from jinja2.utils import Namespace

    for value in values:
        held: Iterable[object] = (value,)
        # By its class: an undefined variable raises whenever it is asked for an attribute. A namespace knows no names
        # but those that the template keeps in it.
        if isinstance(value, Namespace):
            held = object.__getattribute__(value, "_Namespace__attrs").values()
        for text in held:
            if isinstance(text, str | list | tuple) and len(text) > MAX_CHARACTERS:
                raise _TooMuch(_describe_length(len(text)))


def _bounded(compute: Any) -> Any:
    """Return an operator of the template engine that looks at the size of products and powers before they are made."""

    def bounded(context: Any, operator: str, left: Any, right: Any) -> Any:
        size = _product_size(left, right) if operator == "*" else _power_size(left, right)
        if size > MAX_CHARACTERS:
            raise _TooMuch(_describe_length(size))
        return compute(context, operator, left, right)

    return bounded


def _product_size(left: Any, right: Any) -> int:
    if isinstance(left, int) and not isinstance(right, int):
        left, right = right, left
    if isinstance(left, str | bytes | list | tuple) and isinstance(right, int):
        return len(left) * max(right, 0)
    if isinstance(left, int) and isinstance(right, int):
        return (left.bit_length() + right.bit_length()) // 3
    return 0


def _power_size(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int) and right > 0 and left.bit_length() > 1:
        return left.bit_length() * right // 3
    return 0


def _describe_length(length: int) -> str:
    shown = f"{length:,}" if length < 10**15 else "more than 10^15"
    return (
        f"for a short conversation it makes a text, list or number of {shown} characters, elements or digits (at most "
        f"{MAX_CHARACTERS:,} are allowed)"
    )


def _refusal(where: str, why: str) -> str:
    return f"{where} cannot be used: {why}. {_FIX}"


def _describe_fault(where: str, error: Exception) -> str:
    line = getattr(error, "lineno", None)
    at = f", line {line}," if line else ""
    reason = " ".join(str(error).split()) or type(error).__name__
    return f"{where}{at} cannot be compiled: {reason.rstrip('.')}. {_FIX}"


def describe_origin(tokenizer: Any) -> str:
    """Name the model and the file that has the chat template, as far as it lies in a folder.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
    """
    name = str(getattr(tokenizer, "name_or_path", "") or "")
    folder = Path(name)
    if not name or not folder.is_dir():
        return f"The chat template of the model {name}" if name else "The chat template"
    files = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    file = next((each for each in files if (folder / each).is_file()), None)
    return f"The chat template in {folder / file}" if file else f"The chat template of the model in {folder}"


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
