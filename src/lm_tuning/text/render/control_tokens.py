"""Find control tokens, such as ``<|im_end|>``, that somebody typed inside a row.

A tokenizer makes the token itself of such letters, wherever they stand. In a conversation that would end a turn in the
middle of a sentence, so there the letters are tokenized as letters.
"""

from __future__ import annotations

import json
import re
from typing import Any, cast

from lm_tuning.text.records import CharRange, Message, Tools
from lm_tuning.text.render.plain import RenderedRow, RowRefused

TYPED = "control_token"
TYPED_AS_TEXT = "control_token_as_text"
TYPED_KEPT = "control_token_kept"

# Private-use characters stand in for tokens while a template is rendered: none trims or changes them. Two ranges, for
# a row that holds characters of one of them itself.
_STAND_INS = (0xF0000, 0x100000)
_NEVER = re.compile(r"(?!)")


class ControlTokens:
    """Control tokens of a tokenizer, and what is done with typed ones.

    Attributes:
        ids: of all control tokens.
    """

    def __init__(self, tokenizer: Any, *, template: str | None, policy: str) -> None:
        """Collect the tokens.

        Control tokens are the added tokens that are marked special. Others that the chat template writes, such as
        ``<tool_response>``, count in every turn but the assistant's, which may reason and call in their terms.

        Args:
            tokenizer: a transformers tokenizer.
            template: source of the chat template; ``None`` without one.
            policy: ``as_text``, ``keep``, ``drop`` or ``error``.
        """
        added = {str(token): int(index) for index, token in tokenizer.added_tokens_decoder.items()}
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        # A space or line break may be an added token, and is in every row.
        special = {token for token in special if token and not token.isspace()}
        written = {token for token in added if template and token.strip() and token in template}
        self._policy = policy
        self._names = sorted(special | written)
        self._special = _any_of(special)
        self._any = _any_of(special | written)
        self.ids = frozenset(added[name] for name in self._names)

    def find_in_text(self, text: str) -> str | None:
        """Return the first control token in running text.

        Args:
            text: what is looked through.
        """
        found = self._special.search(text)
        return found[0] if found else None

    def find_in_turns(self, messages: list[Message]) -> str | None:
        """Return the first control token in the turns of a conversation.

        Args:
            messages: the conversation; text in all values but the role is looked through.
        """
        for message in messages:
            pattern = self._pattern_of(message)
            for key, value in message.items():
                if key == "role":
                    continue
                # Nearly every value is a text, and every turn of every row comes by here.
                found = pattern.search(value) if value.__class__ is str else _search_inside(pattern, value)
                if found:
                    return found[0]
        return None

    def find_in_tools(self, tools: Tools) -> str | None:
        """Return the first control token in the description of tools.

        Args:
            tools: as the chat template gets them.
        """
        found = _search_inside(self._any, tools)
        return found[0] if found else None

    def settle(self, token: str) -> str:
        """Decide on a row with a typed token.

        Args:
            token: the first one in it.

        Returns:
            The count that the row goes into: ``TYPED_KEPT`` or ``TYPED_AS_TEXT``.

        Raises:
            RowRefused: such rows are dropped, or stop the run.
        """
        if self._policy in ("drop", "error"):
            raise RowRefused(TYPED, f"holds {token!r}")
        return TYPED_KEPT if self._policy == "keep" else TYPED_AS_TEXT

    def mark_text(self, row: RenderedRow) -> None:
        """Note where letters have to stay letters in a row that no template wrote.

        Args:
            row: the row as text.
        """
        row.as_text = [found.span() for found in self._special.finditer(row.text)]

    def hide(self, messages: list[Message], tools: Tools | None) -> tuple[list[Message], Tools | None, dict[str, str]]:
        """Replace every typed token by a stand-in, so that what a template writes can be told from what was typed.

        Args:
            messages: the conversation.
            tools: what it may call.

        Returns:
            Both with stand-ins, and the token of each stand-in.
        """
        # As JSON, so that keys and nested values are looked through as well.
        written = json.dumps([messages, tools], ensure_ascii=False)
        base = next(
            (base for base in _STAND_INS if not any(base <= ord(character) < base + 0x10000 for character in written)),
            None,
        )
        if base is None:
            raise RowRefused(TYPED, "holds a control token, and private-use characters of both planes")
        # One character for each token: the template cannot take a part of it.
        stand_ins = {name: chr(base + position) for position, name in enumerate(self._names)}
        hidden = [self._hide_in(message, stand_ins) for message in messages]
        tools = _replace_inside(self._any, tools, stand_ins) if tools else tools
        return hidden, tools, {stand_in: name for name, stand_in in stand_ins.items()}

    def _hide_in(self, message: Message, stand_ins: dict[str, str]) -> Message:
        pattern = self._pattern_of(message)
        # Templates compare the role with words of their own, so it stays.
        hidden = {
            key: value if key == "role" else _replace_inside(pattern, value, stand_ins)
            for key, value in message.items()
        }
        return cast(Message, hidden)

    def _pattern_of(self, message: Message) -> re.Pattern[str]:
        return self._special if message["role"] == "assistant" else self._any


def show(row: RenderedRow, tokens: dict[str, str]) -> RenderedRow:
    """Merge the typed tokens back and note where their letters stand.

    Args:
        row: rendered with stand-ins.
        tokens: the token of each stand-in.
    """
    chunks: list[str] = []
    as_text: list[CharRange] = []
    edges = [0]
    length = 0
    # (characters + 1,) edges: a stand-in is one character and its token several, so every later position moves.
    for character in row.text:
        token = tokens.get(character, character)
        if token is not character:
            as_text.append((length, length + len(token)))
        length += len(token)
        chunks.append(token)
        edges.append(length)

    def moved(ranges: list[CharRange]) -> list[CharRange]:
        return [(edges[start], edges[end]) for start, end in ranges]

    openings = [edges[position] for position in row.openings]
    return RenderedRow(
        "".join(chunks), moved(row.prompts), moved(row.answers), row.is_closed, openings, row.notes, as_text
    )


def _any_of(tokens: set[str]) -> re.Pattern[str]:
    # An alternation takes the first that matches: what is the start of another token comes after it.
    longest_first = sorted(tokens, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first))) if tokens else _NEVER


def _search_inside(pattern: re.Pattern[str], value: object) -> re.Match[str] | None:
    if isinstance(value, str):
        return pattern.search(value)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return next((found for part in value if (found := _search_inside(pattern, part))), None)
    return None


def _replace_inside(pattern: re.Pattern[str], value: Any, stand_ins: dict[str, str]) -> Any:
    if isinstance(value, str):
        return pattern.sub(lambda found: stand_ins[found[0]], value)
    if isinstance(value, dict):
        return {key: _replace_inside(pattern, part, stand_ins) for key, part in value.items()}
    if isinstance(value, list):
        return [_replace_inside(pattern, part, stand_ins) for part in value]
    return value
