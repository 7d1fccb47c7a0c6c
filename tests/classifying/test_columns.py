"""The text of rows to predict is found by parameters, or by the names that training rows are found by."""

from __future__ import annotations

from typing import Any

import pytest

from lm_tuning.classifying.columns import check_reading, choose_reading
from lm_tuning.data.format.columns import Header
from lm_tuning.errors import UserError
from lm_tuning.parameters import DataParameters, PredictParameters


def read(header: list[str], *, data: dict[str, Any] | None = None, **predict: Any) -> tuple[Any, str | None]:
    """Return what the text is made of, and the column of the label."""
    found = choose_reading(Header(header, "rows.csv"), DataParameters(**data or {}), PredictParameters(**predict))
    return found.mapping.template or found.mapping.columns["text"], found.label


@pytest.mark.parametrize(
    ("columns", "wanted"),
    [
        (["text"], ("text", None)),
        (["id", "Text", "label"], ("Text", "label")),
        (["sentence", "intent", "id"], ("sentence", "intent")),
        (["question"], ("question", None)),
        (["utterance", "category"], ("utterance", "category")),
        # Nobody knows which of two is meant, and nothing depends on it.
        (["text", "label", "intent"], ("text", None)),
    ],
)
def test_usual_names_need_no_parameters(columns: list[str], wanted: tuple[str, str | None]) -> None:
    assert read(columns) == wanted


def test_columns_of_the_training_rows_come_first_and_the_label_may_be_missing() -> None:
    data = {"columns": {"text": "question", "label": "category"}}
    assert read(["text", "question", "category"], data=data) == ("question", "category")
    assert read(["text", "question", "label"], data=data) == ("question", None)
    template = {"template": "{title}: {body}", "columns": {"label": "category"}}
    assert read(["title", "body"], data=template) == ("{title}: {body}", None)


def test_what_predict_says_comes_before_all_that() -> None:
    data = {"template": "{title}: {body}", "columns": {"label": "category"}}
    assert read(["title", "mine", "true"], data=data, columns={"text": "mine", "label": "true"}) == ("mine", "true")
    assert read(["title", "category"], data=data, template="<{title}>") == ("<{title}>", "category")


@pytest.mark.parametrize(
    ("columns", "given", "words"),
    [
        (["a", "b"], {}, "none is usual for a text"),
        (["text", "sentence"], {}, "'text' or 'sentence'"),
        (["text"], {"columns": {"text": "txt"}}, "predict.columns.text names the column 'txt'"),
        (["text"], {"columns": {"label": "lable"}}, "predict.columns.label names the column 'lable'"),
        (["text"], {"template": "{txt}"}, "predict.template names the column 'txt'"),
        (["text"], {"template": "{text"}, "predict.template: "),
        (["text"], {"template": "{text}", "columns": {"text": "text"}}, "both say what the text is"),
        (["text"], {"data": {"columns": {"text": "body"}}}, "data.columns.text names the column 'body'"),
    ],
)
def test_what_cannot_be_read_is_told_with_the_way_out(columns: list[str], given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        read(columns, **given)
    assert words in str(error.value)
    assert "predict.columns" in str(error.value)


def test_a_further_file_has_the_columns_of_the_first() -> None:
    reading = choose_reading(Header(["text", "label"], "a.csv"), DataParameters(), PredictParameters())
    check_reading(reading, Header(["label", "text", "more"], "b.csv"))
    with pytest.raises(UserError, match=r"'text', which b\.csv does not have"):
        check_reading(reading, Header(["label", "other"], "b.csv"))
