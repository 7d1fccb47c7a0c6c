"""Render conversations with any chat template and find the answers in the result.

A template is a program: it may trim, reorder, drop or wrap what it is given. So nothing is assumed about it. Each shape
of conversation (its roles, in order) is rendered once with a marker in place of every content, which shows the
scaffolding around them; each row is then rendered for real, and the answers' positions are only believed when
scaffolding and contents, put together, are that rendering to the character. Rows for which this fails are traced by
rendering their beginnings; rows for which that fails as well are refused, never guessed at.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

from lm_tuning.json_types import JsonObject
from lm_tuning.text.records import CharRange, Message, Tools
from lm_tuning.text.render.chat_template import TemplateCall, attempt
from lm_tuning.text.render.control_tokens import TYPED_AS_TEXT, ControlTokens, show
from lm_tuning.text.render.plain import NOT_VERBATIM, TURN_LEFT_OUT, RenderedRow, RowRefused
from lm_tuning.text.render.probes import ToolArguments, find_alterations, find_hidden_tools

UNTRACEABLE = "untraceable"

_MAX_SHAPES = 4096
# Private-use characters: no template trims or changes them, and they are not in its literals.
_MARKER = "\ue000{}\ue001"
_MARKER_PATTERN = re.compile("\ue000(\\d+)\ue001")
_GENERATION_PATTERN = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Skeleton:
    """The scaffolding that a template puts around a shape of conversation.

    Attributes:
        literals: what stands before, between and after the contents; one more than ``order``.
        order: which message's content stands at each gap.
        leads: characters of the literal before a gap that its answer begins with (markers may say so).
        tails: characters of the literal after a gap that its answer ends with, the end-of-turn token among them.
        extras: characters of the literal before a gap that no generation prompt writes; ``None`` where that is unknown.
        is_closed: whether the last answer ends with an end-of-turn token.
        left_out: messages whose content the template does not show.
        notes: keys of further counts that rows of this shape go into.
    """

    literals: list[str]
    order: list[int]
    leads: list[int]
    tails: list[int]
    extras: list[int | None]
    is_closed: bool
    left_out: list[int]
    notes: list[str]

    def locate(self, text: str, contents: list[str]) -> tuple[list[CharRange], bool] | None:
        """Find each content in the real rendering.

        Args:
            text: the rendering.
            contents: content of every message.

        Returns:
            The range of the content at every gap and whether all stand there verbatim, or ``None`` when scaffolding
            and contents do not add up to the text.
        """
        positions: list[CharRange] = []
        verbatim = True
        at = 0
        # strict=False: there is one more literal than there are contents.
        for literal, after, message in zip(self.literals, self.literals[1:], self.order, strict=False):
            if not text.startswith(literal, at):
                return None
            at += len(literal)
            variant = content = contents[message]
            if not (text.startswith(content, at) and text.startswith(after, at + len(content))):
                # Trimming is the one change that is common enough to be known; any other is traced by the slow way.
                for variant in (content.rstrip(), content.lstrip(), content.strip()):
                    if text.startswith(variant, at) and text.startswith(after, at + len(variant)):
                        break
                else:
                    return None
                verbatim = False
            positions.append((at, at + len(variant)))
            at += len(variant)
        # All of the text has to be accounted for, else a content might have been found at the wrong position.
        if text[at:] != self.literals[-1]:
            return None
        return positions, verbatim


@dataclass(frozen=True)
class OrdinaryAnswer:
    """What a template writes around an answer of plain text.

    Attributes:
        lead: what it puts before the content that no generation prompt writes, such as an empty thought. An answer that
            has no thought is not to be learned with it.
        closing: what ends the answer, without white space; empty where nothing does.
    """

    lead: str
    closing: str

    def is_led(self, message: Message, text: str) -> bool:
        """Return whether the template has put its lead before an answer that did not bring it along.

        Args:
            message: the answer's turn.
            text: what the template writes of it behind its generation prompt.
        """
        content = message.get("content")
        brings_it = isinstance(content, str) and content.lstrip().startswith(self.lead.strip())
        return bool(self.lead) and text.startswith(self.lead) and not brings_it


def _without_weight(message: Message) -> Message:
    """Leave out what is no part of the conversation, so that a turn of role and content alone is known as one."""
    message = message.copy()
    message.pop("weight", None)
    return message


class ChatRenderer:
    """Render conversations with a tokenizer's chat template and trace the answers."""

    def __init__(
        self, tokenizer: Any, control: ControlTokens | None = None, *, template_arguments: JsonObject | None = None
    ) -> None:
        """Look at the template; a tokenizer without one cannot be used.

        Args:
            tokenizer: a transformers tokenizer with a chat template.
            control: what is done with control tokens typed in turns; by default they are not looked for.
            template_arguments: what the template gets beside the conversation, by name.

        Raises:
            UserError: the template reads no such argument.
        """
        self._call = TemplateCall(tokenizer, template_arguments)
        self._tool_arguments = ToolArguments(self._call)
        self._control = control
        # Conversations of a data set have few shapes; the limit is for one in which each has its own tools.
        self._skeleton_of = lru_cache(_MAX_SHAPES)(self._learn)
        self._arguments = dict(template_arguments or {})
        # Templates that say themselves what is generated are believed: `{% generation %}` of transformers.
        self._has_markers = _GENERATION_PATTERN.search(self._call.source) is not None
        # A beginning-of-text token after an answer belongs to the next turn. SmolLM2 and others use one token for both.
        bos = tokenizer.bos_token if tokenizer.bos_token != tokenizer.eos_token else None
        # Longest first: where one token is the start of another, the pattern must not stop at it.
        ends = sorted((str(token) for token in tokenizer.added_tokens_encoder if token != bos), key=len, reverse=True)
        self._end_of_turn = re.compile(r"\s*(?:" + "|".join(map(re.escape, ends)) + ")") if ends else re.compile("(?!)")

    def render(self, messages: list[Message], tools: Tools | None = None) -> RenderedRow:
        """Render one conversation and trace its answers.

        Turns after the last answer that is supervised teach nothing and are cut. An answer whose ``weight`` is 0 is not
        learned.

        Args:
            messages: ``role`` and ``content``, and whatever else the template reads.
            tools: what the conversation may call, handed to the template.

        Returns:
            The row as text.

        Raises:
            RowRefused: no assistant turn, the template refuses the conversation, its output cannot be traced, or it
                holds a control token and such rows are not wanted.
        """
        last = -1
        unsupervised: set[int] = set()
        has_calls = False
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if "tool_calls" in message:
                has_calls = True
            if message.get("weight") == 0:
                unsupervised.add(i)
            else:
                last = i
        if last < 0:
            raise RowRefused("no_assistant_turn")
        notes = ["answer_of_weight_0"] if unsupervised else []
        # What follows the last answer is in no answer's prompt.
        if last + 1 < len(messages):
            notes.append("trailing_turns_cut")
            messages = messages[: last + 1]
        # The weight is for training, not for the template, and a turn without it can be traced by its skeleton.
        if unsupervised or "weight" in messages[last]:
            messages = [_without_weight(turn) for turn in messages]
        if has_calls:
            messages = self._tool_arguments.fit(messages, tools)
        typed_as: dict[str, str] = {}
        if self._control:
            # Before rendering: afterwards a typed token looks like one that the template wrote.
            found = self._control.find_in_turns(messages) or (self._control.find_in_tools(tools) if tools else None)
            notes += [self._control.settle(found)] if found else []
            if TYPED_AS_TEXT in notes:
                messages, tools, typed_as = self._control.hide(messages, tools)
        row = self._trace(messages, tools, unsupervised)
        if typed_as:
            row = show(row, typed_as)
        row.notes += notes
        return row

    def _trace(self, messages: list[Message], tools: Tools | None, unsupervised: set[int]) -> RenderedRow:
        is_plain = True
        for message in messages:
            # Cheaper than isinstance: every turn of every row passes here.
            if len(message) != 2 or message.get("content").__class__ is not str:
                is_plain = False
                break
        text = self._call(messages, tools, is_plain=is_plain)
        row = self._by_skeleton(messages, tools, text, unsupervised) if is_plain else None
        if row is None:
            # Tool calls, reasoning and parts have no shape that could be learned from roles alone.
            row = self._by_beginnings(messages, tools, text, unsupervised)
            row.notes += find_alterations(self._call, messages, tools, text)
        return row

    def _by_skeleton(
        self, messages: list[Message], tools: Tools | None, text: str, unsupervised: set[int]
    ) -> RenderedRow | None:
        """Trace by the scaffolding of the conversation's shape; ``None`` when that does not add up."""
        shape = tuple([message["role"] for message in messages])
        skeleton = self._skeleton_of(shape, json.dumps(tools) if tools else "")
        located = skeleton.locate(text, [message["content"] for message in messages]) if skeleton else None
        if skeleton is None or located is None:
            return None
        positions, verbatim = located
        prompts: list[CharRange] = []
        answers: list[CharRange] = []
        openings: list[int] = []
        for gap, (start, end) in enumerate(positions):
            message_index = skeleton.order[gap]
            if shape[message_index] != "assistant":
                prompts.append((start, end))
                continue
            if message_index not in unsupervised:
                answers.append((start - skeleton.leads[gap], end + skeleton.tails[gap]))
            extra = skeleton.extras[gap]
            if extra is not None:
                openings.append(start - extra)
        notes = [] if verbatim else [NOT_VERBATIM]
        if skeleton.left_out and any(messages[i]["content"].strip() for i in skeleton.left_out):
            notes.append(TURN_LEFT_OUT)
        notes += skeleton.notes
        return RenderedRow(text[: answers[-1][1]], prompts, answers, skeleton.is_closed, openings, notes)

    def _learn(self, shape: tuple[str, ...], tools_json: str) -> Skeleton | None:
        """Render a shape with markers for contents and read the scaffolding off."""
        tools: Tools | None = json.loads(tools_json) if tools_json else None
        messages: list[Message] = [{"role": role, "content": _MARKER.format(i)} for i, role in enumerate(shape)]
        text = attempt(self._call, messages, tools, is_plain=True)
        gaps = list(_MARKER_PATTERN.finditer(text))
        order = [int(gap[1]) for gap in gaps]
        answered = [message for message in order if shape[message] == "assistant"]
        # Every answer once and in order, and the last of them after every prompt; else spans would mean something else.
        expected = [i for i, role in enumerate(shape) if role == "assistant"]
        if answered != expected or not order or order[-1] != len(shape) - 1:
            return None
        # Start and end of every marker in turn: even ones begin a literal, odd ones end it.
        edges = [0, *(position for gap in gaps for position in gap.span()), len(text)]
        literals = [text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]
        # Only those that hold a whole content: other markers are the template's business.
        marked = self._call.marked_ranges(messages, tools) if self._has_markers else []
        leads = [0] * len(gaps)
        tails = [0] * len(gaps)
        for i, gap in enumerate(gaps):
            for start, end in marked:
                if start <= gap.start() and gap.end() <= end:
                    leads[i] = min(gap.start() - start, len(literals[i]))
                    tails[i] = min(end - gap.end(), len(literals[i + 1]))
        # What follows the last content up to and with the first token that may end a turn
        closing = self._end_of_turn.match(literals[-1])
        extras: list[int | None] = [None] * len(gaps)
        for i in (i for i, message in enumerate(order) if shape[message] == "assistant"):
            extras[i] = self._beyond_generation_prompt(messages[: order[i]], tools, text[: gaps[i].start()])
            # A turn in the middle ends as the last one does: what merely follows it may be the next turn's beginning.
            if closing and literals[i + 1].startswith(closing[0]):
                tails[i] = max(tails[i], closing.end())
        left_out = sorted({*range(len(shape))} - {*order})
        notes = find_hidden_tools(self._call, messages, tools) if tools else []
        return Skeleton(literals, order, leads, tails, extras, closing is not None, left_out, notes)

    def _beyond_generation_prompt(self, messages: list[Message], tools: Tools | None, text: str) -> int | None:
        """Count the characters that a rendering has more than the prompt that generation starts from."""
        try:
            prompt = self._call(messages, tools, is_plain=True, add_generation_prompt=True)
        except RowRefused:
            return None
        return len(text) - len(prompt) if text.startswith(prompt) else None

    def _by_beginnings(
        self, messages: list[Message], tools: Tools | None, text: str, unsupervised: set[int]
    ) -> RenderedRow:
        """Trace by rendering the conversation up to each answer: what the whole adds to that is the answer.

        An earlier answer that the template writes otherwise once more turns follow (reasoning left out, for example) is
        not supervised; the last one has to be traced.
        """
        traced: list[CharRange] = []
        answers: list[CharRange] = []
        openings: list[int] = []
        is_closed = False
        notes: list[str] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            try:
                opening, answer, closes = self._trace_turn(messages, tools, i, text)
            except RowRefused:
                if i == len(messages) - 1:
                    raise
                if i not in unsupervised:
                    notes = ["answer_not_learned"]
                continue
            openings.append(opening)
            traced.append(answer)
            if i not in unsupervised:
                answers.append(answer)
                is_closed = closes
        between = [(end, start) for (_, end), (start, _) in pairwise([(0, 0), *traced])]
        prompts = self._within(messages, text, between)
        return RenderedRow(text[: answers[-1][1]], prompts, answers, is_closed, openings, notes)

    def _trace_turn(
        self, messages: list[Message], tools: Tools | None, turn: int, text: str
    ) -> tuple[int, CharRange, bool]:
        """Return where generation of an answer begins, its range, and whether an end-of-turn token closes it."""
        # Three renderings for one answer: the prompt, the conversation with it, and the prompt without the invitation.
        before = self._call(messages[:turn], tools, add_generation_prompt=True) if turn else ""
        upto = self._call(messages[: turn + 1], tools)
        start = len(before)
        if not text.startswith(before) or not upto.startswith(before):
            given = f" (with tokenize.template_arguments = {self._arguments})" if self._arguments else ""
            raise RowRefused(UNTRACEABLE, f"turn {turn + 1} does not begin as its generation prompt ends{given}")
        if not turn or before == self._call(messages[:turn], tools):
            # No header invites the answer, so what was added may begin with one; only the content is sure.
            content = str(messages[turn].get("content") or "").strip()
            start = text.find(content, start)
            if not content or start < 0:
                raise RowRefused(UNTRACEABLE, f"the content of turn {turn + 1} is not in the rendered text")
        elif self._ordinary.is_led(messages[turn], upto[start:]):
            start += len(self._ordinary.lead)
        # With its end-of-turn token: a line break behind that belongs to the next turn.
        end, is_closed = self._end_of_answer(upto[start:])
        if not text.startswith(upto[: start + end] if is_closed else upto):
            raise RowRefused(UNTRACEABLE, f"the template writes turn {turn + 1} otherwise when more turns follow")
        return len(before), (start, start + end), is_closed

    @cached_property
    def _ordinary(self) -> OrdinaryAnswer:
        """What the template writes around the answer to a single question."""
        skeleton = self._skeleton_of(("user", "assistant"), "")
        if skeleton is None:
            return OrdinaryAnswer("", "")
        closing = self._end_of_turn.match(skeleton.literals[-1])
        extra = skeleton.extras[-1] or 0
        before = skeleton.literals[-2]
        lead = before[len(before) - extra :] if extra > 0 and not skeleton.leads[-1] else ""
        return OrdinaryAnswer(lead if lead.strip() else "", closing[0].strip() if closing else "")

    def _end_of_answer(self, text: str) -> tuple[int, bool]:
        """Return where an answer ends in all that follows its prompt, and whether an end-of-turn token closes it."""
        closing = self._ordinary.closing
        # From behind, since the answer itself may speak of the token as text.
        end = text.rfind(closing) + len(closing) if closing in text else 0
        if closing and end and not self._end_of_turn.sub("", text[end:]).strip():
            return end, True
        return len(text.rstrip()), False

    def _within(self, messages: list[Message], text: str, ranges: list[CharRange]) -> list[CharRange]:
        """Return where the prompts' contents stand inside these ranges; truncation leaves the rest alone."""
        found: list[CharRange] = []
        at = 0
        for message in messages:
            content = message.get("content")
            if message["role"] == "assistant" or not isinstance(content, str) or not content.strip():
                continue
            # In order, so that a prompt which repeats an earlier one is not found there.
            start = text.find(content.strip(), at)
            end = start + len(content.strip())
            if start >= 0 and any(low <= start and end <= high for low, high in ranges):
                found.append((start, end))
                at = end
        return found
