"""What is masked, what stays, and that masked addresses can be used again."""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest

from lm_tuning import secrets
from lm_tuning.errors import UserError
from lm_tuning.reporting.markdown import write_inline
from lm_tuning.secrets import (
    conceal_address,
    is_secret_name,
    mask,
    mask_error,
    mask_known,
    mask_report,
    mask_values,
    mask_variable,
    remember,
    remember_settings,
    reveal_address,
)


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, empty in (("_known", set()), ("_known_pattern", None), ("_addresses", {}), ("_authorities", {})):
        monkeypatch.setattr(secrets, name, empty)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://bob:PW@host/rows.jsonl", "http://***@host/rows.jsonl"),
        ("read 'http://bob:p@ss@host:80/x' twice", "read 'http://***@host:80/x' twice"),
        ("http://bob:p/w#1?@host/x", "http://***@host/x"),
        ("https://ghost@host/x", "https://***@host/x"),
        ("zip://x.csv::https://u:p@host/a.zip", "zip://x.csv::https://***@host/a.zip"),
        ("postgresql+psycopg://u:p@host/db", "postgresql+psycopg://***@host/db"),
        ("https://h/r.jsonl?token=abc&x=1&X-Amz-Signature=f%2F", "https://h/r.jsonl?token=***&x=1&X-Amz-Signature=***"),
        ("-p a=1,environment.variables.HF_TOKEN=y,seed=1", "-p a=1,environment.variables.HF_TOKEN=***,seed=1"),
        ("environment.variables.my_password: y", "environment.variables.my_password: ***"),
        ("HF_TOKEN=y: environment.variables asks for it", "HF_TOKEN=***: environment.variables asks for it"),
        ("{'HF_TOKEN': 'it''s', 'a': 1}", "{'HF_TOKEN': '***''s', 'a': 1}"),
        ('{"AWS_SECRET_ACCESS_KEY": "a \\" b"}', '{"AWS_SECRET_ACCESS_KEY": "***"}'),
        ("  HF_TOKEN: y\n", "  HF_TOKEN: ***\n"),
        ("--params db_password=abc,hub_token='x y'", "--params db_password=***,hub_token='***'"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("{'authorization': 'Basic Ym9i'}", "{'authorization': 'Basic ***'}"),
        ("a token hf_abcdefghijklmnop.", "a token ***."),
        ("ghp_0123456789abcdefABCD", "***"),
    ],
)  # fmt: skip
def test_secrets_are_masked(text: str, shown: str) -> None:
    assert mask(text) == shown
    assert mask(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "http://localhost:8080/a@b.jsonl",
        "s3://bucket/rows.jsonl, sqlite:////home/bob/mlflow.db",
        "split.key=id TOKENIZERS_PARALLELISM=false CUBLAS_WORKSPACE_CONFIG=:4096:8",
        "train.effective_batch_tokens=8192, micro_batch_tokens: auto",
        "set HF_TOKEN for a private one; the KEY: x is no variable",
        "bob@example.com wrote [INST] what? [/INST]",
        "https://host/search?q=token&page=2",
        "a bearer of news, basic authentication",
        "hf_hub hf_internal_testing hf_transfer",
        "pad_token='<pad>', tokens=5, split.key=id, a secret is no password",
    ],
)
def test_everything_else_stays(text: str) -> None:
    assert mask(text) == text


@pytest.mark.parametrize("name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "dbPassword", "X-Amz-Security-Token", "sig"])
def test_names_that_tell(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "max_tokens", "HF_TOKEN_PATH", "PWD"])
def test_names_that_do_not(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize("text", ["a" * 10**6, "A" * 10**6, "\n" * 10**6, " " * 10**6, "?a=" * 10**5, "a://" * 10**5])
def test_long_texts_take_no_longer_than_their_length(text: str) -> None:
    # A pattern that went back at each character would take hours here.
    assert mask(f"x://y {text}") == f"x://y {text}"


def test_nested_values() -> None:
    given = {
        "data": {"path": ["http://b:PW@h/x", {"path": "rows.jsonl"}], "columns": {"key": "id"}},
        "environment": {"variables": {"HF_TOKEN": "y", "my_token": "z", "OMP_NUM_THREADS": "2"}},
        "class_weights": {"TOKEN": 2.0},
    }
    assert mask_values(given) == {
        "data": {"path": ["http://***@h/x", {"path": "rows.jsonl"}], "columns": {"key": "id"}},
        "environment": {"variables": {"HF_TOKEN": "***", "my_token": "***", "OMP_NUM_THREADS": "2"}},
        "class_weights": {"TOKEN": 2.0},
    }
    assert mask_variable("HF_TOKEN", "y") == "***"
    assert mask_variable("HTTPS_PROXY", "http://u:p@proxy:80") == "http://***@proxy:80"


def test_what_was_remembered_is_masked_wherever_it_stands_by_itself() -> None:
    remember(["hunter22", "test", "x1", "validation"])
    assert mask("password hunter22, 'hunter22'") == "password ***, '***'"
    assert mask("hunter222 test validation x1") == "hunter222 test validation x1"
    remember([__file__])
    assert mask(f"no such file: {__file__}") == f"no such file: {__file__}"


def test_settings_are_remembered_with_their_passwords_decoded_too() -> None:
    remember_settings(
        {"environment": {"variables": {"MY_KEY": "k-1234567"}}, "path": "http://bob:s3cr%40et@host/d/*.jsonl"}
    )
    assert mask("k-1234567 s3cr@et s3cr%40et") == "*** *** ***"


def test_a_stored_address_is_found_again() -> None:
    stored = conceal_address("https://bob:PW@host:81/rows.jsonl?token=abc")
    assert stored == "https://***@host:81/rows.jsonl?token=***"
    assert reveal_address(stored) == "https://bob:PW@host:81/rows.jsonl?token=abc"
    assert reveal_address("https://***@host:81/other.jsonl") == "https://bob:PW@host:81/other.jsonl"
    assert reveal_address("https://***@host:8/other.jsonl") == "https://***@host:8/other.jsonl"
    assert conceal_address("rows.jsonl") == reveal_address("rows.jsonl") == "rows.jsonl"


def test_no_message_to_a_user_has_a_secret() -> None:
    error = UserError(["data.path names 'http://bob:PW@host/x'", "fine"])
    assert error.problems == ["data.path names 'http://***@host/x'", "fine"]
    assert "PW" not in str(error)


def test_an_error_and_its_causes_are_masked_in_place() -> None:
    try:
        try:
            raise OSError(2, "no http://bob:PW@host", "http://bob:PW@host/x")
        except OSError as cause:
            raise RuntimeError("http://bob:PW@host", 3) from cause
    except RuntimeError as error:
        mask_error(error)
        assert error.args == ("http://***@host", 3)
        assert str(error.__cause__) == "[Errno 2] no http://***@host: 'http://***@host/x'"


@pytest.mark.parametrize(
    "name",
    [
        "PGPASSWORD",
        "DB_PASS",
        "MYSECRETKEY",
        "SSHPASS",
        "HF_TOKENS",
        "MYTOKEN",
        "JWT",
        "SENTRY_DSN",
        "SLACK_WEBHOOK_URL",
    ],
)
def test_names_of_secret_variables_that_are_written_together(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["NUM_TOKENIZERS", "BYPASS", "TOKENIZERS_PARALLELISM", "COMPASS_DIR"])
def test_names_that_only_look_like_it(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "secret",
    ["p&ss'w\"rd<1>", "a b+c/d=e%f", "back\\slash\\9", "비밀번호-9", "key😀end1", "-BEGIN-\nx9\n-END-"],
)
@pytest.mark.parametrize(
    "write",
    [
        str,
        repr,
        lambda text: repr({"a": [text]}),
        lambda text: json.dumps(repr(text)),
        json.dumps,
        lambda text: json.dumps(text, ensure_ascii=False),
        html.escape,
        quote,
        quote_plus,
        lambda text: f"x%3D{quote(text, safe='')}%26",
        lambda text: shlex.join(["kedro", text]),
        write_inline,
    ],
)  # fmt: skip
def test_what_was_remembered_is_masked_in_whatever_form_it_is_written(secret: str, write: Callable[[str], str]) -> None:
    written = write(secret)
    remember([secret])
    masked = mask_known(f"see {written} there")
    assert "***" in masked and masked.startswith("see ") and masked.endswith(" there")
    assert not any(part in masked for part in ("ss", "b+c", "slash", "비밀", "😀", "x9", "\\ud83d", "%EB"))


def test_an_escape_before_a_secret_does_not_hide_it() -> None:
    remember(["hunter22"])
    assert mask_known(r"a\nhunter22 %20hunter22 \x1bhunter22 \u001bhunter22") == r"a\n*** %20*** \x1b*** \u001b***"
    assert mask_known("ahunter22 hunter22a") == "ahunter22 hunter22a"


def test_words_that_only_look_like_a_secret_stay_in_reports() -> None:
    remember(["hunter22"])
    report = {"rows": ["TOKEN=abc http://a:b@host", ("hunter22", 1.5)], "n": None}
    assert mask_report(report) == {"rows": ["TOKEN=abc http://a:b@host", ["***", 1.5]], "n": None}


@pytest.mark.parametrize("text", ["\\" * 10**5, "$" * 10**5, "%5c" * 10**5, " " * 10**5])
def test_known_secrets_are_looked_for_once_at_each_position(text: str) -> None:
    remember(["$a\\\\b c%d'e", "\\\\\\x99", " x  y-1"])
    assert mask_known(text) == text
