"""The report names every row that was left out or changed, and says in a table what became of the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lm_tuning.parameters.data import TokenizeParameters
from lm_tuning.text.tokenize import read_token_report, write_tokens
from tests.support.tiny import make_tokenizer
from tests.text.conftest import store_examples


def report(tmp_path: Path, rows: list[Any], **options: Any) -> dict[str, Any]:
    validation = options.pop("validation", [])
    examples = store_examples(tmp_path / "examples", "prompt_response", rows, validation=validation)
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    task = options.pop("task", "causal_lm")
    settings = TokenizeParameters(**{"max_length_tokens": 16, **options})
    write_tokens(tokens, examples, make_tokenizer(), settings, task=task)
    return read_token_report(tokens)


LONG = ("0123456789abcdefghij", "yes", None)
SHORT = ("01234", "yes", None)


def test_every_dropped_row_is_named(tmp_path):
    section = report(tmp_path, [SHORT, *[LONG] * 30], validation=[LONG, SHORT], truncation="drop")
    train, validation = section["facts"]["dropped"]
    assert (train["split"], train["kind"], train["num_rows"]) == ("train", "too_long", 30)
    assert train["row_numbers"] == {"rows.jsonl": list(range(2, 32))}
    assert train["rows"][0] == {"file": "rows.jsonl", "row": 2, "reason": "longer than tokenize.max_length_tokens"}
    assert validation["row_numbers"] == {"rows.jsonl": [32]}
    assert section["facts"]["changed"] == []
    assert section["metrics"]["data_rows_dropped_by_tokenizing"] == 31
    assert section["metrics"]["data_train_rows"] == 1
    assert section["metrics"]["data_train_tokens"] == 12
    assert section["metrics"]["data_train_supervised_tokens"] == 4
    assert "data_test_supervised_fraction" not in section["metrics"], "no rows, no share"
    text = section["markdown"]
    assert "- 30 in train: longer than `tokenize.max_length_tokens`.\n  - rows.jsonl, row 2\n" in text
    assert "  - rows.jsonl, row 21\n  - and 10 more\n- 1 in validation" in text


def test_the_table_says_what_was_made(tmp_path):
    section = report(tmp_path, [SHORT, LONG])
    text = section["markdown"]
    assert text.startswith("## Tokens\n")
    assert "as chat template; at most 16 tokens per row (`truncate_prompt`), loss on `assistant`." in text
    assert "BOS `<bos>`, EOS `<|end|>`, PAD `<pad>`" in text
    assert "| split | rows read | rows kept | tokens | supervised |" in text
    assert "| train | 2 | 2 | 28 | 28.6% | 16 | 16 | 16 | 16 |" in text
    assert "| test | 0 | 0 | 0 |  | 0 | 0 | 0 | 0 |" in text
    assert "| rows.jsonl | 1 | 2 |" in text
    assert "### Rows left out\n\nNone." in text
    assert "- 1 in train: part of the prompt cut to fit.\n  - rows.jsonl, row 2" in text
    [changed] = section["facts"]["changed"]
    assert changed["row_numbers"] == {"rows.jsonl": [2]}
    assert json.loads(json.dumps(section)) == section


def test_what_was_said_of_a_row_stands_beside_it(tmp_path):
    section = report(tmp_path, [SHORT, ("say <|end|>\n|", "b", None)], control_tokens="drop")
    assert "  - rows.jsonl, row 2: holds '\\<\\|end\\|\\>'\n" in section["markdown"]


def test_every_changed_row_is_named_and_counted_once(tmp_path):
    typed = ("0123456789<|end|>abcdefghij", "yes", None)
    section = report(tmp_path, [SHORT, *[typed] * 25])
    kinds = {outcome["kind"]: outcome for outcome in section["facts"]["changed"]}
    assert set(kinds) == {"prompt_shortened", "control_token_as_text"}
    for outcome in kinds.values():
        assert outcome["row_numbers"] == {"rows.jsonl": list(range(2, 27))}
    assert section["metrics"]["data_rows_changed_by_tokenizing"] == 25
