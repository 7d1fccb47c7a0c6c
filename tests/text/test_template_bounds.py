"""A chat template that is broken or does not come to an end is refused before any row, in counted steps."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from transformers import AutoTokenizer

from lm_tuning.errors import UserError
from lm_tuning.text.render.chat_template import TemplateCall
from tests.support import templates
from tests.support.tiny import CHAT_TEMPLATE, make_tokenizer, save_tiny_model

TALL = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
ENDLESS = {
    "loops inside each other": TALL + "{% endfor %}" * 3,
    "loops that write": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "a filter": "{% for a in range(99999) %}{{ range(99999) | map('string') | join }}{% endfor %}",
    "only with tools": "{% if tools %}" + TALL + "{% endfor %}" * 3 + "{% endif %}",
    "only with a system turn": "{% if messages[0].role == 'system' %}" + TALL + "{% endfor %}" * 3 + "{% endif %}",
    "a macro": "{% macro m(n) %}{% for a in range(99) %}{{ m(n) if n else '' }}{% endfor %}{% endmacro %}{{ m(n) }}"
    "{% macro k(n) %}{% if n %}{{ k(n - 1) }}{{ k(n - 1) }}{% endif %}{% endmacro %}{{ k(30) }}",
}
HUGE = {
    "a product": "{{ 'x' * 10000000000 }}",
    "a product of a variable": "{{ messages[0].content * 10000000000 }}",
    "a list": "{{ ([0] * 10000000000) | length }}",
    "a power": "{{ 9 ** (9 ** (9 ** 9)) }}",
    "a text that doubles": "{% set ns = namespace(t='x') %}{% for a in range(60) %}{% set ns.t = ns.t ~ ns.t %}"
    "{% endfor %}{{ ns.t | length }}",
    "its output": "{% for a in range(2000) %}{{ 'x' * 1000 }}{% endfor %}",
}
BROKEN = {
    "an unclosed tag": ("{% for m in messages %}\n{{ m.content }", "line 2"),
    "a loop without an end": ("{% for m in messages %}{{ m.content }}", "endfor"),
    "an unknown filter": ("{{ messages | nonsense }}", "nonsense"),
    "deep nesting": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be compiled"),
}
REAL = {
    name: value for name, value in vars(templates).items() if name.isupper() and isinstance(value, str) and "{" in value
}


@pytest.mark.parametrize("template", list(ENDLESS.values()), ids=list(ENDLESS))
def test_what_does_not_end_is_refused(template: str) -> None:
    with pytest.raises(UserError, match=r"cannot be used: a short conversation takes more than 100,000 steps"):
        TemplateCall(make_tokenizer(chat_template=CHAT_TEMPLATE + template))


@pytest.mark.parametrize("template", list(HUGE.values()), ids=list(HUGE))
def test_what_grows_without_measure_is_refused(template: str) -> None:
    with pytest.raises(UserError, match=r"cannot be used: for a short conversation it makes a text, list or number"):
        TemplateCall(make_tokenizer(chat_template=CHAT_TEMPLATE + template))


@pytest.mark.parametrize(("template", "said"), list(BROKEN.values()), ids=list(BROKEN))
def test_what_is_no_template_is_named_with_file_and_line(tmp_path: Path, template: str, said: str) -> None:
    folder = save_tiny_model(tmp_path / "model", chat_template=template)
    with pytest.raises(UserError) as error:
        TemplateCall(AutoTokenizer.from_pretrained(folder))
    [message] = error.value.problems
    assert message.startswith(f"The chat template in {folder / 'chat_template.jinja'}")
    assert said in message
    assert "put a working chat_template.jinja into its folder" in message


def test_several_templates_without_a_default_are_named() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"rag": CHAT_TEMPLATE, "plain": CHAT_TEMPLATE}
    with pytest.raises(UserError, match=r"cannot be chosen: .*rag"):
        TemplateCall(tokenizer)


def test_a_template_with_a_fault_only_some_rows_meet_is_not_refused() -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}" + CHAT_TEMPLATE
    call = TemplateCall(make_tokenizer(chat_template=template))
    assert call([{"role": "user", "content": "a"}], is_plain=True) == "<|user|>a<|end|>"


@pytest.mark.parametrize("template", list(REAL.values()), ids=list(REAL))
def test_real_templates_are_far_within_the_bounds(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm_tuning.text.render.chat_template.MAX_LINES", 5_000)
    monkeypatch.setattr("lm_tuning.text.render.chat_template.MAX_CHARACTERS", 20_000)
    TemplateCall(make_tokenizer(chat_template=template))


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, ENDLESS["loops inside each other"]], ids=["good", "endless"])
def test_a_debugger_s_trace_goes_on(template: str) -> None:
    seen: list[str] = []

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        seen.append(frame.f_code.co_name)

    def marked() -> None:
        pass

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        try:
            TemplateCall(make_tokenizer(chat_template=template))
        except UserError:
            pass
        after = sys.gettrace()
        marked()
    finally:
        sys.settrace(before)
    assert after is watch
    assert "marked" in seen
