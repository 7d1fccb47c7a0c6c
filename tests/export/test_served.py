"""What MLflow is told of an export: how a request is worded, and how its answer is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.export.records import ServedModel
from lm_tuning.export.served import describe_served
from lm_tuning.parameters.export import ExportParameters
from tests.support.stored import chat_row, publish_tokens, save_tuned
from tests.support.tiny import BOS, END, ids, make_tokenizer, save_tiny_model

CHAT = {"format": "prompt_response", "control_tokens": "allow", "template_arguments": {}, "system_turn": "keep"}
PLAIN = {"format": "text", "control_tokens": "allow"}


def describe(folder: Path, rendering: dict[str, Any], *rows: Any, adds_bos: bool = False) -> ServedModel:
    """Describe a merged model whose rows were written so."""
    base = save_tiny_model(folder / "base", adds_bos=adds_bos)
    tuned = save_tuned(folder / "tuned", base, "lora", tokens_key="k")
    make_tokenizer(adds_bos=adds_bos).save_pretrained(tuned)
    facts = json.loads((tuned / "tuning.json").read_text())
    (tuned / "tuning.json").write_text(json.dumps({**facts, "rendering": rendering}))
    tokens = publish_tokens(folder / "tokens", "k", test=rows or [chat_row("what?", "it")])
    record: Any = {
        "format": "merged",
        "task": "causal_lm",
        "dtype": "float32",
        "base_model": "base",
        "base_digest": "d",
        "tokens_key": "k",
        "mlflow_run_id": None,
        "num_embeddings": None,
        "parity": {"distance": {"mean_kl_nats": 0.0}},
    }
    return describe_served(tuned, record, tuned, tokens, ExportParameters(register_as="m"), max_new_tokens=200)


@pytest.mark.parametrize(
    ("rendering", "is_chat"),
    [(CHAT, True), ({"template_arguments": {}, "system_turn": "keep"}, True), (PLAIN, False), ({}, False)],
)
def test_a_request_is_a_chat_where_a_template_wrote_the_rows(
    tmp_path: Path, rendering: dict[str, Any], is_chat: bool
) -> None:
    served = describe(tmp_path, rendering)
    assert served["settings"]["is_chat"] is is_chat
    assert served["pipeline_task"] == ("llm/v1/chat" if is_chat else "text-generation")


PROMPT = ([BOS, *ids("what?"), *ids("it"), END], [(6, 9)])
TEXT = ([BOS, *ids("once upon"), END], [(1, 11)])


@pytest.mark.parametrize("row", [PROMPT, TEXT])
def test_a_plain_text_gets_the_bos_token_that_its_rows_had(tmp_path: Path, row: Any) -> None:
    format = "text" if row is TEXT else "prompt_response"
    settings = describe(tmp_path, {**PLAIN, "format": format}, row, adds_bos=True)["settings"]
    assert settings["adds_special_tokens"]
    assert settings["max_new_tokens"] == 200
    assert (settings["strip_token_id"], settings["append_token_id"]) == (None, None)


def test_a_chat_and_rows_without_bos_token_get_none(tmp_path: Path) -> None:
    chat = chat_row("what?", "it")
    assert not describe(tmp_path / "a", CHAT, chat, adds_bos=True)["settings"]["adds_special_tokens"]
    bare = (PROMPT[0][1:], [(5, 8)])
    assert not describe(tmp_path / "b", PLAIN, bare, adds_bos=True)["settings"]["adds_special_tokens"]
