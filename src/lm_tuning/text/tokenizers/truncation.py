"""Make long rows fit: take from the prompt first, from the answer only when nothing else is left.

The fixed text of templates and the roles' scaffolding stay. What gives way are the texts of the row: columns, turns,
or the one prompt that there is, the longest first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise

from lm_tuning.text.align.masks import Encoding, TokenizedRow, inner_span
from lm_tuning.text.records import CharRange, Message, Span
from lm_tuning.text.render.plain import RenderedRow, RowRefused

PROMPT_EMPTIED = "prompt_emptied"
ANSWER_SHORTENED = "answer_shortened"
END_CUT = "end_cut"
TOO_LONG = "too_long"
NO_ANSWER_LEFT = "no_answer_left"

CUTTING = ("truncate_prompt", "truncate_end")
"""Ways to truncate that keep a part of a long row."""


def shorten_row(
    row: TokenizedRow,
    rendered: RenderedRow,
    encoding: Encoding,
    *,
    limit: int,
    truncation: str,
    cut_prompt_at: str = "middle",
    yielding: Sequence[CharRange] | None = None,
) -> tuple[TokenizedRow, list[str]]:
    """Cut a row that is longer than the limit.

    ``truncate_prompt`` takes tokens out of what yields, see ``choose_cuts``; the beginning-of-text token, fixed text,
    the roles' scaffolding and the whole answer stay. When the answer alone leaves no room, the prompt keeps at most
    half of the limit and the answer loses its end, and with it its EOS token. ``truncate_end`` keeps the first tokens.

    Args:
        row: a row of more than ``limit`` tokens.
        rendered: the same row as text.
        encoding: the tokens of the text.
        limit: tokens that may stay.
        truncation: ``truncate_prompt``, ``truncate_end``, ``drop`` or ``error``.
        cut_prompt_at: ``middle``, ``end`` or ``start``.
        yielding: half-open character ranges of the text that may give way; ``None`` for the prompts.

    Returns:
        The shorter row, and the counts that it goes into.

    Raises:
        RowRefused: the row is to be dropped, or no supervised token would be left.
    """
    if truncation in ("drop", "error"):
        raise RowRefused(TOO_LONG)
    ranges = rendered.prompts if yielding is None else yielding
    if truncation == "truncate_end" or not ranges:
        return _cut_end(row, limit), [END_CUT]
    spans = [inner_span(encoding, chars, len(rendered.text)) for chars in ranges]
    excess = len(row.ids) - limit
    num_prompt = sum(end - start for start, end in spans)
    notes = ["prompt_shortened"]
    if excess > num_prompt:
        notes = [ANSWER_SHORTENED]
        # Half of the limit: an answer is little use without what it answers, and the other way round.
        excess = num_prompt - min(num_prompt, limit // 2)
    cuts = choose_cuts(spans, encoding.offsets, num_cut=excess, cut_at=cut_prompt_at)
    if is_emptied(spans, cuts):
        notes.append(PROMPT_EMPTIED)
    shifted = [(start + row.num_prefixed, end + row.num_prefixed) for start, end in cuts]
    return _cut_end(_cut_out(row, shifted), limit), notes


def choose_cuts(spans: Sequence[Span], offsets: Sequence[CharRange], *, num_cut: int, cut_at: str) -> list[Span]:
    """Choose the tokens that go, never half a character.

    The longest span gives way first, down to the length of the next; then both, and so on. So a short question keeps
    every word as long as there is a long document beside it.

    Args:
        spans: half-open token positions of what may give way, disjoint.
        offsets: characters of every token.
        num_cut: tokens that have to go, at most as many as the spans hold. A few more go where they end inside a
            character.
        cut_at: ``middle`` keeps as much of the start as of the end, ``end`` and ``start`` keep the other side.

    Returns:
        One half-open range of token positions for each span, empty where all of it stays.
    """
    lengths = [end - start for start, end in spans]
    cuts: list[Span] = []
    for (start, end), num_kept in zip(spans, _share_room(lengths, sum(lengths) - num_cut), strict=True):
        num_head = {"middle": (num_kept + 1) // 2, "end": num_kept, "start": 0}[cut_at]
        first, after = start + num_head, end - (num_kept - num_head)
        if first < after:
            # Tokens that share a character go together: half of its bytes is no text.
            while first > start and offsets[first][0] < offsets[first - 1][1]:
                first -= 1
            while after < end and offsets[after][0] < offsets[after - 1][1]:
                after += 1
        cuts.append((first, after))
    return cuts


def is_emptied(spans: Sequence[Span], cuts: Sequence[Span]) -> bool:
    """Return whether nothing is left of one of the spans.

    Args:
        spans: what may give way.
        cuts: what goes of each, see ``choose_cuts``.
    """
    return any(cut == span and span[0] < span[1] for span, cut in zip(spans, cuts, strict=True))


def shorten_prompt(ids: Sequence[int], room: int, special_ids: Collection[int]) -> list[int]:
    """Cut a prompt that leaves no room for an answer: its longest texts give way in the middle, as in ``shorten_row``.

    What stands between two special tokens is a text; its first and last words say whose turn it is and what is wanted.

    Args:
        ids: token ids of the prompt.
        room: tokens that may stay.
        special_ids: tokens that stay. Where they alone are too many, the prompt loses its start.
    """
    edges = [-1, *(index for index, token in enumerate(ids) if token in special_ids), len(ids)]
    spans = [(before + 1, after) for before, after in pairwise(edges) if after - before > 1]
    num_cut = min(max(len(ids) - room, 0), sum(end - start for start, end in spans))
    offsets = [(index, index + 1) for index in range(len(ids))]
    kept = [*ids]
    for start, end in reversed(choose_cuts(spans, offsets, num_cut=num_cut, cut_at="middle")):
        del kept[start:end]
    return kept[-room:]


def align_columns(rendered: RenderedRow, prompt: str, columns: Sequence[CharRange]) -> list[CharRange]:
    """Find the columns that a prompt was made of in the row's text.

    Args:
        rendered: the row as text.
        prompt: the prompt.
        columns: half-open character ranges of the columns in the prompt; what lies between them is fixed text.

    Returns:
        Character ranges in the text: those of the columns, and of other prompts such as the system message. All prompts
        where the template has changed this one.
    """
    core, lead = prompt.strip(), len(prompt) - len(prompt.lstrip())
    for index, (start, end) in reversed([*enumerate(rendered.prompts)]):
        found = rendered.text.rfind(core, start, end)
        if found < 0:
            continue
        base = found - lead
        others = [chars for other, chars in enumerate(rendered.prompts) if other != index]
        aligned = [(max(low + base, start), min(high + base, end)) for low, high in columns]
        # What a merged system turn put before the prompt may give way too.
        return [
            *others,
            *([(start, base)] if start < base else []),
            *((low, high) for low, high in aligned if low < high),
        ]
    return rendered.prompts


def split_off_systems(rendered: RenderedRow, systems: Sequence[str]) -> list[CharRange]:
    """Tell the text of merged system turns from that of the user turns which they were put before.

    Args:
        rendered: the row as text.
        systems: texts of the system turns.

    Returns:
        Character ranges of the prompts, those that begin with a system text in two.
    """
    ranges: list[CharRange] = []
    for start, end in rendered.prompts:
        found = next((text for text in systems if text and rendered.text.startswith(text, start, end)), "")
        edge = start + len(found)
        ranges += [(start, edge), (edge, end)] if start < edge < end else [(start, end)]
    return ranges


def later_exchanges(messages: list[Message], excess_fraction: float) -> list[Message] | None:
    """Leave out the oldest exchanges of a conversation that is too long, so that the later ones stay whole.

    Leading system messages stay. An exchange reaches from a user turn that follows another role to the next such turn.

    Args:
        messages: the conversation.
        excess_fraction: share of its tokens that has to go.

    Returns:
        A conversation that should fit, by the number of characters; at least the last exchange with an answer.
        ``None`` when there is no older one.
    """
    num_system = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    last_answer = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)
    openings = [
        i
        for i in range(num_system + 1, last_answer)
        if messages[i]["role"] == "user" and messages[i - 1]["role"] != "user"
    ]
    if not openings:
        return None
    # Characters before each message: rendering every candidate to count its tokens would cost more than it saves.
    reached = [0, *accumulate(len(str(message.get("content") or "")) for message in messages)]
    wanted = excess_fraction * reached[-1]
    opening = next((i for i in openings if reached[i] - reached[num_system] >= wanted), openings[-1])
    return messages[:num_system] + messages[opening:]


def _share_room(lengths: Sequence[int], room: int) -> list[int]:
    """Give short spans all that they need and the others equal shares of the rest."""
    shares = [0] * len(lengths)
    by_length = sorted(range(len(lengths)), key=lambda span: lengths[span])
    for position, span in enumerate(by_length):
        # The shortest first: what it leaves over is shared by all that are longer.
        shares[span] = min(lengths[span], room // (len(lengths) - position))
        room -= shares[span]
    return shares


def _cut_end(row: TokenizedRow, limit: int) -> TokenizedRow:
    spans = [(start, min(end, limit)) for start, end in row.spans if start < limit]
    if not any(end > max(start, 1) for start, end in spans):
        raise RowRefused(NO_ANSWER_LEFT)
    return TokenizedRow(row.ids[:limit], spans, row.num_prefixed)


def _cut_out(row: TokenizedRow, cuts: Sequence[Span]) -> TokenizedRow:
    """Remove ranges of tokens."""
    # (tokens,); its running sum is where each position has moved to
    keep = [1] * len(row.ids)
    for start, end in cuts:
        keep[start:end] = [0] * (end - start)
    index = [0, *accumulate(keep)]
    spans = [(index[start], index[end]) for start, end in row.spans]
    ids = [token for token, kept in zip(row.ids, keep, strict=True) if kept]
    return TokenizedRow(ids, spans, row.num_prefixed)
