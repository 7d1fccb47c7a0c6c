"""Conversations through ``kedro run``: what a template refuses or hides is said, and no word is lost in silence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.text.store.table import open_split
from tests.pipelines.test_whole_run import Project
from tests.support import templates
from tests.support.shell import Shell
from tests.support.tiny import CHARACTERS, CHAT_TEMPLATE, SPECIALS, save_tiny_model

EMPTY_THOUGHT = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last and m.reasoning_content %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{% endif %}"
)
SWITCHED = "{% if mood %}<|system|>Mood: {{ mood }}<|end|>{% endif %}" + CHAT_TEMPLATE
NO_SYSTEM = CHAT_TEMPLATE.replace(
    "{% for message in messages %}", "{% for message in messages if message['role'] != 'system' %}"
)
OBJECTS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXTS = OBJECTS.replace(" | tojson", "")
TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "refusing": templates.GEMMA,
    "failing": CHAT_TEMPLATE + "{{ messages[0].content + 1 }}",
    "hiding": NO_SYSTEM,
    "empty_thought": EMPTY_THOUGHT,
    "thinking": THINKING,
    "switched": SWITCHED,
    "objects": OBJECTS,
    "texts": TEXTS,
}


class Conversations(Project):
    """A project with one tiny model for each template."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for name, template in TEMPLATES.items():
            save_tiny_model(folder / "models" / name, chat_template=template)

    def tokenize(
        self,
        template: str,
        rows: list[Any],
        *,
        exit_code: int = 0,
        **params: object,
    ) -> str:
        """Run split and tokenize on some rows; objects are rows as they are, lists are conversations."""
        written = [row if isinstance(row, dict) else {"messages": row} for row in rows]
        (self.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
        given = {"model__name_or_path": f"models/{template}", "split__validation": 0, "split__test": 0, **params}
        return " ".join(self.run("--pipelines=split,tokenize", exit_code=exit_code, **given).split())

    def tokens(self) -> list[tuple[str, str]]:
        """Return the training rows as text, and what is supervised of each."""
        store = self.folder / "data/05_model_input/smoke/tokens"
        table = open_split(store / json.loads((store / "current.json").read_text())["key"], "train")
        names = [*SPECIALS, *CHARACTERS]
        found = []
        for row in table:
            text = [names[token] for token in row.input_ids]
            found.append(("".join(text), "|".join("".join(text[start:end]) for start, end in row.spans)))
        return found

    def changed(self) -> dict[str, int]:
        """Return what tokenizing changed in training rows."""
        return dict(self.read("08_reporting", "token_summary.json")["splits"]["train"]["changed"])


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Conversations]:
    folder = tmp_path_factory.mktemp("conversations")
    project = Conversations(folder / "project")
    with Shell(folder, project.environment) as project.shell:
        yield project


def turns(*contents: str, system: str | None = None, **of_last: Any) -> list[dict[str, Any]]:
    """Write a conversation of user and assistant in turn; keys of the last turn beside its content."""
    messages = [
        {"role": ("user", "assistant")[index % 2], "content": content} for index, content in enumerate(contents)
    ]
    messages[-1] |= of_last
    return [*([{"role": "system", "content": system}] if system else []), *messages]


MOSTLY_SYSTEM = [turns(f"q{n}", f"a{n}", system="be brief" if n < 8 else None) for n in range(10)]


def test_rows_that_the_template_refuses_stop_the_run_with_a_way_that_works(project: Conversations) -> None:
    printed = project.tokenize("refusing", MOSTLY_SYSTEM, exit_code=2)
    named = "rows.jsonl, rows 1, 2, 3, 4, 5, 6, 7, 8: 8 train rows cannot be used (refused by the chat template): "
    assert f"{named}no system role" in printed
    assert "data.on_bad_row: skip and a data.max_bad_fraction above their share" in printed
    assert "tokenize.system_turn: merge_into_user" in printed
    assert "Traceback" not in printed
    project.tokenize("refusing", MOSTLY_SYSTEM, tokenize__system_turn="merge_into_user")
    text, supervised = project.tokens()[0]
    assert text == "<bos><|user|>user\nbe brief\n\nq0<|end|>\n<|user|>model\na0<|end|>"
    assert supervised == "a0<|end|>"
    assert len(project.tokens()) == 10


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_a_template_that_fails_on_every_row_is_told_once(project: Conversations, on_bad_row: str) -> None:
    rows = [turns(f"q{index}", "a") for index in range(12)]
    printed = project.tokenize("failing", rows, exit_code=2, data__on_bad_row=on_bad_row, data__max_bad_fraction=0.99)
    assert printed.count("refuses every row that it is given (12 rows)") == 1
    assert "chat_template.jinja (see model.name_or_path)" in printed
    assert "Of rows.jsonl, row 1, it says: can only concatenate str" in printed
    assert "12 train rows cannot be used" not in printed
    assert "No training row is left" not in printed


def test_skipping_refused_rows_is_bounded_by_the_share_that_may_be_bad(project: Conversations) -> None:
    printed = project.tokenize("refusing", MOSTLY_SYSTEM, exit_code=2, data__on_bad_row="skip")
    assert "8 of 10 rows (80.0%) cannot be used, and data.max_bad_fraction lets 5.0% pass" in printed
    assert "8 train rows cannot be used (refused by the chat template): no system role" in printed
    project.tokenize("refusing", MOSTLY_SYSTEM, data__on_bad_row="skip", data__max_bad_fraction=0.9)
    assert len(project.tokens()) == 2


def test_few_refused_rows_may_be_skipped_as_the_message_says(project: Conversations) -> None:
    rows = [turns("q", "a", system="s"), *[turns(f"q{index}", "a") for index in range(3)]]
    printed = project.tokenize("refusing", rows, exit_code=2)
    assert "rows.jsonl, row 1: 1 train row cannot be used" in printed
    assert "leave them out and have them counted with data.on_bad_row: skip." in printed
    assert "cannot be used, and data.max_bad_fraction" not in printed
    printed = project.tokenize("refusing", rows, data__on_bad_row="skip")
    assert "train rows dropped: 1 (refused by the chat template; rows.jsonl, row 1)" in printed
    assert len(project.tokens()) == 3


def test_rows_skipped_in_reading_count_towards_that_share(project: Conversations) -> None:
    rows = [*[turns("q", "a")] * 91, *[turns("q", "a", system="s")] * 4, *[{"messages": 3}] * 5]
    printed = project.tokenize("refusing", rows, exit_code=2, data__on_bad_row="skip")
    assert "9 of 100 rows (9.0%) cannot be used" in printed


def test_a_system_turn_that_the_template_leaves_out_is_told(project: Conversations) -> None:
    printed = project.tokenize("hiding", MOSTLY_SYSTEM)
    assert project.changed() == {"turn_left_out": 8}
    assert "train rows changed: 8 (the chat template leaves a turn out" in printed
    printed = project.tokenize("hiding", MOSTLY_SYSTEM, exit_code=2, tokenize__on_altered_content="error")
    assert "rows.jsonl, rows 1, 2, 3, 4, 5, 6, 7, 8" in printed
    merged = {"tokenize__on_altered_content": "error", "tokenize__system_turn": "merge_into_user"}
    project.tokenize("hiding", MOSTLY_SYSTEM, **merged)
    assert project.tokens()[0][0] == "<|user|>be brief\n\nq0<|end|><|assistant|>a0<|end|>"


@pytest.mark.parametrize("template", ["plain", "empty_thought"])
@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_that_the_template_does_not_show_is_told(project: Conversations, template: str, key: str) -> None:
    # The thought is a word of the question, so that looking for it in the text would find it.
    rows = [turns("why so", "b", **{key: "so"}), turns("c", "d"), turns("e", "f", **{key: "hm"})]
    project.tokenize(template, rows)
    assert project.changed() == {"reasoning_left_out": 2}
    # An empty thought that the template puts there is no part of the answer.
    assert [supervised for _, supervised in project.tokens()] == ["b<|end|>", "d<|end|>", "f<|end|>"]
    printed = project.tokenize(template, rows, exit_code=2, tokenize__on_altered_content="error")
    assert "rows.jsonl, rows 1, 3" in printed
    assert "tokenize.on_altered_content" in printed


def test_reasoning_that_the_template_shows_is_supervised_and_old_one_is_no_loss(project: Conversations) -> None:
    first = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "thinking": "old"}]
    rows = [turns("a", "b", reasoning_content="so"), [*first, *turns("c", "d", reasoning_content="new")]]
    project.tokenize("thinking", rows, tokenize__on_altered_content="error")
    assert [supervised for _, supervised in project.tokens()] == [
        "<think>so</think>b<|end|>",
        "<think>new</think>d<|end|>",
    ]
    assert project.changed() == {"earlier_answer_shortened": 1, "answer_not_learned": 1}


def test_arguments_of_the_template_reach_it_and_make_other_tokens(project: Conversations) -> None:
    rows = [turns("a", "b"), turns("c", "d")]
    project.tokenize("switched", rows)
    assert project.tokens()[0][0] == "<|user|>a<|end|><|assistant|>b<|end|>"
    project.tokenize("switched", rows, **{"tokenize.template_arguments.mood": "good"})
    assert project.tokens()[0] == ("<|system|>Mood: good<|end|><|user|>a<|end|><|assistant|>b<|end|>", "b<|end|>")
    assert project.read("08_reporting", "token_summary.json")["template_arguments"] == {"mood": "good"}


def test_a_tuned_model_is_evaluated_with_the_arguments_that_it_was_trained_with(project: Conversations) -> None:
    rows = [turns(f"a{index}", f"b{index}") for index in range(40)]
    params = {"model__name_or_path": "models/switched", "split__validation": 4, "split__test": 4}
    (project.folder / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    project.run("--pipelines=split,train,evaluate", **params, **{"tokenize.template_arguments.mood": "good"})
    rendering = project.read("06_models", "tuned_model/tuning.json")["rendering"]
    assert rendering == {
        "format": "messages",
        "control_tokens": "auto",
        "template_arguments": {"mood": "good"},
        "system_turn": "keep",
    }
    evaluation = json.dumps(project.read("08_reporting", "evaluation.json"))
    assert "Mood: good" in evaluation


def test_arguments_that_the_template_does_not_read_are_refused_with_those_it_reads(project: Conversations) -> None:
    rows = [turns("a", "b"), turns("c", "d")]
    printed = project.tokenize("switched", rows, exit_code=2, **{"tokenize.template_arguments.moods": "good"})
    assert "tokenize.template_arguments.moods = 'good'" in printed
    assert "It reads mood." in printed
    printed = project.tokenize("switched", rows, exit_code=2, **{"tokenize.template_arguments.messages": "good"})
    assert "messages is given to the template for each row" in printed


def call(arguments: Any, name: str = "add", question: str = "address?") -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}]},
    ]


@pytest.mark.parametrize("template", ["objects", "texts"])
def test_arguments_of_a_tool_call_are_supervised_as_json_once(project: Conversations, template: str) -> None:
    arguments = {"a": 1, "b": "x"}
    rows = [call(arguments), call(json.dumps(arguments)), call(json.dumps(json.dumps(arguments)))]
    rows = rows if template == "objects" else rows[:2]
    project.tokenize(template, rows, tokenize__on_altered_content="error")
    assert {supervised for _, supervised in project.tokens()} == {'add {"a": 1, "b": "x"}<|end|>'}


def test_arguments_that_are_no_json_object_are_bad_rows_where_an_object_is_wanted(project: Conversations) -> None:
    rows = [call({"a": 1}), call("a=1"), call({"b": 2})]
    printed = project.tokenize("objects", rows, exit_code=2)
    assert "rows.jsonl, row 2: 1 train row cannot be used (a tool call has arguments that are no JSON object" in printed
    assert "'a=1'" in printed


def test_a_call_left_out_is_told_although_its_name_is_in_the_question(
    project: Conversations,
) -> None:
    lost = [*call({"a": 1}), {"role": "tool", "content": "2"}, {"role": "assistant", "content": "two"}]
    lost[1]["content"] = "let me add"
    project.tokenize("plain", [lost, turns("a", "b")])
    assert project.changed() == {"tools_left_out": 1}
    project.tokenize("plain", [lost, turns("a", "b")], exit_code=2, tokenize__on_altered_content="error")


def test_tools_left_out_are_told_although_their_names_are_in_the_question(
    project: Conversations,
) -> None:
    tools = [{"type": "function", "function": {"name": "add", "description": "adds"}}]
    project.tokenize("plain", [{"messages": turns("add it", "b"), "tools": tools}, {"messages": turns("c", "d")}])
    assert project.changed() == {"tools_left_out": 1}


LONG = "".join(f" w{index}" for index in range(60))


@pytest.mark.parametrize(
    ("template", "start", "end"),
    [
        ("Summarize the following:\\n{text}", "Summarize the following:\n w0 w1", "w58 w59"),
        ("{text}\\n\\nSummarize the text above.", " w0 w1", "w59\n\nSummarize the text above."),
        ("Text: {text}\\nQuestion: {question}", "Text:  w0 w1", "w59\nQuestion: Who? Text: Question: "),
    ],
)
def test_a_long_column_gives_way_and_the_instruction_stays(
    project: Conversations, template: str, start: str, end: str
) -> None:
    rows = [{"text": LONG, "question": "Who? Text: Question: ", "answer": f"a{index}"} for index in range(2)]
    params = {
        "data__template": f'"{template}"',
        "data__columns__response": "answer",
        "tokenize__max_length_tokens": 80,
        "tokenize__max_lost_fraction": 1,
    }
    project.tokenize("plain", rows, **params)
    text, supervised = project.tokens()[0]
    assert text.startswith("<|user|>" + start)
    assert text.endswith(end + "<|end|><|assistant|>a0<|end|>")
    assert supervised == "a0<|end|>"
    assert project.changed() == {"prompt_shortened": 2}


def test_a_conversation_keeps_its_system_turn_and_its_last_question(project: Conversations) -> None:
    messages = turns("old " + LONG, "a0", "Who is w3?", "a1", system="Be brief.")
    project.tokenize("plain", [messages] * 2, tokenize__max_length_tokens=60, tokenize__max_lost_fraction=1)
    assert project.tokens()[0][0] == "<|system|>Be brief.<|end|><|user|>Who is w3?<|end|><|assistant|>a1<|end|>"
    assert project.changed() == {"old_turns_dropped": 2}


def test_a_prompt_of_which_nothing_fits_is_told(project: Conversations) -> None:
    printed = project.tokenize("plain", [turns("question", "a" * 20)] * 2, tokenize__max_length_tokens=24)
    assert project.tokens()[0][0] == f"<|user|><|end|><|assistant|>{'a' * 20}<|end|>"
    assert project.changed() == {"prompt_shortened": 2, "prompt_emptied": 2}
    assert "train rows changed: 2 (nothing left of a prompt" in printed
    assert "rows.jsonl, rows 1, 2" in printed


def test_the_text_of_a_class_keeps_the_fixed_text_of_its_template(project: Conversations) -> None:
    rows = [{"text": LONG, "kind": ("x", "y")[index % 2]} for index in range(4)]
    params = {
        "task": "sequence_classification",
        "data__columns__label": "kind",
        "data__template": '"Intent of: {text} (in bank)"',
        "split__duplicates": "ignore",
        "tokenize__max_length_tokens": 40,
        "tokenize__max_lost_fraction": 1,
    }
    project.tokenize("plain", rows, **params)
    text, _ = project.tokens()[0]
    assert text.startswith("Intent of:  w0 w1") and text.endswith("w59 (in bank)")
    assert project.changed() == {"text_shortened": 4}
