"""A chat asks in the wording of training, remembers what was said, and shows text as it is made."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from lm_tuning.answering.chat import Chat, open_chat
from lm_tuning.answering.streaming import TextStream
from lm_tuning.answering.terminal import talk
from lm_tuning.errors import UserError
from lm_tuning.parameters import Parameters
from tests.support.stored import save_tuned
from tests.support.tiny import ASSISTANT, END, SYSTEM, USER, ids, make_tokenizer, save_tiny_model
from tests.support.tiny_tasks import make_seq2seq, save_base, save_tuned_task


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    base = save_tiny_model(folder / "base")
    return save_tuned(
        folder / "tuned",
        base,
        "lora",
        tokens_key="k",
        compute_dtype="float32",
        rendering={"format": "prompt_response"},
    )


def chat_with(folder: Path, *, who: str = "tuned", system: str | None = None, **generation: Any) -> Chat:
    options = {"max_new_tokens": 5, **generation}
    parameters = Parameters(generate={"generation": options}, model={"dtype": "float32"})
    return open_chat(folder, parameters, who=who, system=system, max_new_tokens=None)


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens of every prompt that is asked from here on."""
    from lm_tuning.answering import chat

    seen: list[list[int]] = []
    stream = chat.stream_answer

    def note(model: Any, prompt: list[int], *given: Any, **more: Any) -> Any:
        seen.append(prompt)
        return stream(model, prompt, *given, **more)

    monkeypatch.setattr(chat, "stream_answer", note)
    return seen


def say(chat: Chat, *lines: str, width: int = 80, is_terminal: bool = False) -> str:
    """Type some lines; return what is shown."""
    typed: Iterator[str] = iter(lines)
    console = Console(file=io.StringIO(), width=width, force_terminal=is_terminal, highlight=False, markup=False)
    talk(chat, console, lambda: next(typed, None))
    file: Any = console.file
    return str(file.getvalue())


def test_turns_are_remembered_until_they_are_to_be_forgotten(tuned: Path, prompts: list[list[int]]) -> None:
    chat = chat_with(tuned, system="be kind")
    shown = say(chat, "one", "two", "/reset", "three")
    start = [SYSTEM, *ids("be kind"), END]
    asked = [USER, *ids("one"), END, ASSISTANT]
    assert prompts[0] == [*start, *asked]
    reply = prompts[1][len(prompts[0]) : prompts[1].index(END, len(prompts[0]))]
    assert reply, "the answer of the first turn, as it was shown"
    assert prompts[1] == [*start, *asked, *reply, END, USER, *ids("two"), END, ASSISTANT]
    assert prompts[2] == [*start, USER, *ids("three"), END, ASSISTANT]
    assert shown.count("tuned> ") == 3
    assert make_tokenizer().decode(reply) in shown
    assert "Forgotten." in shown


def test_an_answer_is_that_of_the_libraries_alone(tuned: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tuned.parent / "base", dtype=torch.float32)
    model = PeftModel.from_pretrained(model, tuned)
    prompt = torch.tensor([[USER, *ids("hello"), END, ASSISTANT]])
    expected: list[str] = []
    for block in (model.disable_adapter, None):
        made = model.generate(input_ids=prompt, max_new_tokens=5, do_sample=False) if block is None else None
        if block is not None:
            with block():
                made = model.generate(input_ids=prompt, max_new_tokens=5, do_sample=False)
        expected.append(make_tokenizer().decode(made[0, prompt.shape[1] :], skip_special_tokens=True))
    chat = chat_with(tuned, who="both")
    assert chat.speakers[0].model is chat.speakers[1].model, "an adapter is loaded once"
    chat.ask("hello")
    assert [chat.reply(speaker, lambda text: None).text for speaker in chat.speakers] == expected
    assert expected[0] != expected[1]


@pytest.mark.parametrize(("width", "is_beside"), [(140, True), (60, False)])
def test_two_answers_stand_side_by_side_where_there_is_room(
    tuned: Path, monkeypatch: pytest.MonkeyPatch, width: int, is_beside: bool
) -> None:
    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda self: True})())
    shown = say(chat_with(tuned, who="both"), "hello", width=width, is_terminal=True)
    assert ("base>" in shown) == (not is_beside)
    heads = [line for line in shown.splitlines() if "base" in line and "tuned" in line and "/" not in line]
    assert bool(heads) == is_beside


def test_the_oldest_turns_leave_first_and_that_is_said_once(tuned: Path, prompts: list[list[int]]) -> None:
    chat = chat_with(tuned, max_new_tokens=100)
    questions = [f"{number} " + "x" * 80 for number in range(6)]
    shown = say(chat, *questions)
    assert shown.count("the oldest turns are left out") == 1
    assert all(len(prompt) <= 412 for prompt in prompts)
    last = make_tokenizer().decode(prompts[-1])
    assert questions[5] in last
    assert questions[0] not in last


def test_a_stopped_answer_is_forgotten_and_the_chat_goes_on(
    tuned: Path, monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]]
) -> None:
    chat = chat_with(tuned, who="both")
    reply = chat.reply

    def stop_the_second(speaker: Any, write: Callable[[str], object]) -> Any:
        if speaker.name == "tuned" and len(prompts) == 1:
            raise KeyboardInterrupt
        return reply(speaker, write)

    monkeypatch.setattr(chat, "reply", stop_the_second)
    shown = say(chat, "one", "two")
    assert "this exchange is forgotten" in shown
    assert [make_tokenizer().decode(prompt) for prompt in prompts[1:]] == ["<|user|>two<|end|><|assistant|>"] * 2


def test_commands_are_explained_and_a_question_may_begin_with_a_slash(tuned: Path, prompts: list[list[int]]) -> None:
    shown = say(chat_with(tuned), "/nonsense", "/usr/bin is what?", "", "/exit", "never asked")
    assert "There is no command /nonsense" in shown
    assert "/reset" in shown
    assert len(prompts) == 1


def test_control_characters_of_an_answer_do_not_reach_the_terminal(
    tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = chat_with(tuned)
    monkeypatch.setattr(chat, "reply", lambda speaker, write: write("a\x1b[2Jb") or _reply())
    assert "a\\u001b[2Jb" in say(chat, "hello")


def _reply() -> Any:
    from lm_tuning.answering.chat import Reply

    return Reply("", 1, 1.0, "stop", False)


def test_running_text_is_gone_on_with_and_said_to_be(tuned: Path, tmp_path: Path, prompts: list[list[int]]) -> None:
    save_tuned(tmp_path / "text", tuned.parent / "base", "lora", tokens_key="k", rendering={"format": "text"})
    chat = chat_with(tmp_path / "text")
    shown = say(chat, "once upon", "a time")
    assert "it goes on with the text that you type" in shown
    assert prompts == [ids("once upon"), ids("a time")]
    with pytest.raises(UserError, match="--system"):
        chat_with(tmp_path / "text", system="be kind")


def test_without_a_chat_template_the_template_of_the_rows_words_each_prompt(
    tmp_path: Path, prompts: list[list[int]]
) -> None:
    base = save_tiny_model(tmp_path / "base", chat_template=None)
    folder = save_tuned(tmp_path / "tuned", base, "lora", tokens_key="k", rendering={"format": "prompt_response"})
    make_tokenizer(chat_template=None).save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    parameters = Parameters(
        generate={"generation": {"max_new_tokens": 3}},
        model={"dtype": "float32"},
        data={"path": "rows.jsonl", "template": "Q: {question}\nA:", "columns": {"response": "answer"}},
    )
    chat = open_chat(folder, parameters, who="tuned", system=None, max_new_tokens=4)
    shown = say(chat, "why?", "how?")
    assert "what you type goes into the template" in shown
    assert prompts == [ids("Q: why?\nA:\n"), ids("Q: how?\nA:\n")]
    assert chat.speakers[0].answering.generation.max_new_tokens == 4


def test_an_encoder_decoder_answers_each_prompt_by_itself(tmp_path: Path) -> None:
    base = save_base(make_seq2seq(), tmp_path / "base")
    folder = save_tuned_task(tmp_path / "tuned", base, make_seq2seq(seed=1), "full", "seq2seq_lm", tokens_key="k")
    shown = say(chat_with(folder, who="both"), "hello")
    assert "An encoder-decoder answers each prompt by itself" in shown
    assert "base> " in shown and "tuned> " in shown


def test_text_is_held_back_while_it_may_still_be_cut_off() -> None:
    written: list[str] = []
    stream = TextStream(make_tokenizer(), ["STOP"], written.append)
    for size in range(1, len("abSTSTOP") + 1):
        stream.update(ids("abSTSTOP")[:size])
    stream.finish("abST")
    assert written == ["a", "b", "ST"]


def test_what_cannot_be_talked_to_is_told(tuned: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a tuned model"):
        chat_with(tmp_path)
    with pytest.raises(UserError, match=r"generate\.generation\.max_new_tokens = 600 is too long"):
        chat_with(tuned, max_new_tokens=600)
    facts = json.loads((tuned / "tuning.json").read_text())
    classifier = tmp_path / "classifier"
    classifier.mkdir()
    (classifier / "tuning.json").write_text(json.dumps({**facts, "task": "sequence_classification"}))
    with pytest.raises(UserError, match="--pipelines=predict"):
        chat_with(classifier)
