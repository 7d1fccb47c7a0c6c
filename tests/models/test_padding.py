"""The pad token is an existing one unlike the EOS token wherever there is one."""

from __future__ import annotations

import pytest

from lm_tuning.errors import UserError
from lm_tuning.models.loading import choose_pad_token
from tests.support.tiny import END, make_tokenizer


def test_the_tokenizers_own_pad_token_stays():
    assert choose_pad_token(make_tokenizer()) == "<pad>"


def test_a_free_special_token_is_taken_when_pad_equals_eos():
    tokenizer = make_tokenizer(pad_token="<|end|>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == END
    assert choose_pad_token(tokenizer) == "<pad>"
    assert tokenizer.pad_token == "<|end|>", "choosing changes nothing"


def test_a_free_special_token_is_taken_when_there_is_no_pad_token():
    assert choose_pad_token(make_tokenizer(pad_token=None)) == "<pad>"


def test_a_token_that_the_chat_template_writes_is_not_free():
    tokenizer = make_tokenizer(pad_token=None, chat_template="{{ '<pad>' }}{{ messages[0]['content'] }}")
    assert choose_pad_token(tokenizer) == "<unk>"


def test_the_eos_is_the_last_resort(monkeypatch):
    monkeypatch.setattr("lm_tuning.models.loading.PAD_NAMES", ())
    assert choose_pad_token(make_tokenizer(pad_token=None)) == "<|end|>"


def test_without_any_candidate_the_user_is_told(monkeypatch):
    monkeypatch.setattr("lm_tuning.models.loading.PAD_NAMES", ())
    tokenizer = make_tokenizer(pad_token=None)
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no pad token, no EOS token"):
        choose_pad_token(tokenizer)
