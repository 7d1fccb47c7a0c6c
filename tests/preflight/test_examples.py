from __future__ import annotations

from lm_tuning.preflight.tokens import decode_parts
from lm_tuning.text.store.table import TokenTable
from tests.preflight.conftest import Look, questions
from tests.support.stored import write_rows
from tests.support.tiny import ASSISTANT, END, USER, ids, make_tokenizer


def test_supervised_parts_and_control_tokens_are_told_apart(tmp_path):
    row = [USER, *ids("a\n"), END, ASSISTANT, *ids("bc"), END, END]
    table: TokenTable = write_rows([(row, [(5, 8)])], tmp_path / "train.arrow")
    parts = decode_parts(table[0], make_tokenizer(), set(range(8)))
    assert [(part["text"], part["is_learned"], part["is_control"]) for part in parts] == [
        ("<|user|>", False, True),
        ("a\n", False, False),
        ("<|end|>", False, True),
        ("<|assistant|>", False, True),
        ("bc", True, False),
        ("<|end|>", True, True),
        ("<|end|>", False, True),
    ]


def test_examples_say_where_their_rows_stand(look: Look):
    first, second = look(questions(3), questions(2), num_examples=2, splitting={"test": 0})["examples"]
    assert (first["row_id"], first["row"], first["num_tokens"], first["num_supervised"]) == (1, 1, 9, 2)
    assert first["file"].endswith("rows0.jsonl")
    assert second["row"] == 2
    assert "".join(part["text"] for part in first["parts"]) == "<|user|>a02?<|end|><|assistant|>4<|end|>"


def test_there_may_be_fewer_rows_than_asked_for(look: Look):
    assert len(look(questions(2), num_examples=10)["examples"]) == 2
