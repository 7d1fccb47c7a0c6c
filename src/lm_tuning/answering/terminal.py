"""Talk at a terminal, or in lines of text where there is none."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lm_tuning.answering.chat import Chat, Reply, Speaker
from lm_tuning.errors import UserError
from lm_tuning.wording import visible, write_speed

_WIDE_ENOUGH = 100
"""Characters of a line from which two answers stand side by side."""
_COMMANDS = {
    "/help": "show these commands",
    "/reset": "forget what was said so far",
    "/exit": "end the conversation, as Ctrl-D does",
}


def talk(chat: Chat, console: Console | None = None, read: Callable[[], str | None] | None = None) -> None:
    """Answer what is typed until the end of the input.

    Args:
        chat: whom to ask.
        console: where to write; ``None`` for standard output.
        read: returns the next line, ``None`` at the end; by default from standard input.
    """
    console = console or Console(highlight=False, markup=False, emoji=False)
    is_terminal = console.is_terminal and sys.stdin.isatty()
    read = read or (_read_at_terminal if is_terminal else _read_line)
    for told in chat.describe():
        console.print(Text(visible(told), style="dim"), soft_wrap=True)
    if is_terminal:
        console.print(Text(f"{', '.join(_COMMANDS)}; Ctrl-C stops an answer, Ctrl-D ends.", style="dim"))
    while (line := read()) is not None:
        text = line.strip()
        if text == "/exit":
            return
        if text == "/reset":
            chat.reset()
            console.print(Text("Forgotten.", style="dim"))
        elif text == "/help" or (text.startswith("/") and " " not in text and text[1:].isalpha()):
            _show_help(console, text)
        elif text:
            _answer(chat, text, console, is_live=is_terminal)


def _read_line() -> str | None:
    return sys.stdin.readline() or None


def _read_at_terminal() -> str | None:
    import readline  # noqa: F401 - importing it gives input() arrow keys and a history

    try:
        return input("you> ")
    except EOFError:
        sys.stdout.write("\n")
        return None


def _show_help(console: Console, text: str) -> None:
    if text not in _COMMANDS:
        console.print(Text(f"There is no command {text}.", style="yellow"))
    for name, meaning in _COMMANDS.items():
        console.print(Text(f"{name}  {meaning}"))


def _answer(chat: Chat, question: str, console: Console, *, is_live: bool) -> None:
    """Let every model reply; a question that cannot be put, or an answer that is stopped, ends nothing."""
    chat.ask(question)
    try:
        if is_live and len(chat.speakers) > 1 and console.width >= _WIDE_ENOUGH:
            replies = _answer_side_by_side(chat, console)
        else:
            replies = [_answer_in_turn(chat, speaker, console, is_live=is_live) for speaker in chat.speakers]
    except KeyboardInterrupt:
        chat.take_back()
        console.print(Text("\n(stopped: this exchange is forgotten)", style="yellow"))
        return
    except UserError as error:
        chat.take_back()
        for problem in error.problems:
            console.print(Text(visible(problem), style="red"), soft_wrap=True)
        return
    if any(reply.forgot for reply in replies):
        told = "(the conversation is longer than the model's context: from here on the oldest turns are left out)"
        console.print(Text(told, style="yellow"), soft_wrap=True)


def _answer_in_turn(chat: Chat, speaker: Speaker, console: Console, *, is_live: bool) -> Reply:
    """Write an answer as it comes, behind the name of the model."""

    def write(text: str) -> None:
        console.out(visible(text), end="", highlight=False)
        console.file.flush()

    console.print(Text(f"{speaker.name}> ", style="bold"), end="")
    reply = chat.reply(speaker, write)
    console.print()
    if is_live:
        console.print(Text(_describe(reply), style="dim"))
    return reply


def _answer_side_by_side(chat: Chat, console: Console) -> list[Reply]:
    """Write the answers into two columns, one after the other, each as it comes."""
    texts = {speaker.name: "" for speaker in chat.speakers}
    ends = dict.fromkeys(texts, "")

    def table() -> Table:
        columns = Table(expand=True, box=None, padding=(0, 2, 0, 0))
        for name in texts:
            columns.add_column(name, ratio=1, overflow="fold")
        columns.add_row(*(Text(text) for text in texts.values()))
        columns.add_row(*(Text(end, style="dim") for end in ends.values()))
        return columns

    replies = []
    with Live(get_renderable=table, console=console, refresh_per_second=12) as live:
        for speaker in chat.speakers:

            def write(text: str, name: str = speaker.name) -> None:
                texts[name] += visible(text)

            replies.append(chat.reply(speaker, write))
            ends[speaker.name] = _describe(replies[-1])
        live.refresh()
    return replies


def _describe(reply: Reply) -> str:
    speed = write_speed(reply.num_tokens / reply.seconds) if reply.seconds else "-"
    cut = ", cut at the limit" if reply.finish_reason == "length" else ""
    return f"({reply.num_tokens} tokens, {speed} tokens per second{cut})"
