"""Rows and answers that a model has no positions for are refused before its weights are read."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from lm_tuning.errors import UserError
from lm_tuning.parameters import EvaluateParameters, GenerationParameters, ModelParameters, TrainParameters
from lm_tuning.pipelines.tokenize.nodes import prepare_base_model
from lm_tuning.pipelines.train.run_settings import TrainingGroups, gather_settings
from tests.pipelines.test_tokenize import ROWS, project, publish_splits, run_whole  # noqa: F401
from tests.support.answers import take_generation
from tests.support.tiny import BOS, END, VOCABULARY, bart_config, make_model, make_tokenizer

SHORT = EvaluateParameters(generation=GenerationParameters(max_new_tokens=4))
LONG = [*ROWS, ("a" * 30, "b" * 12, None)]


def save_gpt2(positions: int) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=len(VOCABULARY),
        n_positions=positions,
        n_embd=8,
        n_layer=1,
        n_head=1,
        bos_token_id=BOS,
        eos_token_id=END,
    )
    save(GPT2LMHeadModel(config))


def save_bart(positions: int) -> None:
    from transformers import BartForConditionalGeneration

    save(BartForConditionalGeneration(bart_config(max_position_embeddings=positions)))


def save(model: Any) -> None:
    model.save_pretrained("model")
    make_tokenizer().save_pretrained("model")


def start_training(task: str = "causal_lm", train: dict[str, Any] | None = None, **tokenize: Any) -> Any:
    """Tokenize, then do what the train node does before it trains."""
    folder, *_ = run_whole(task=task, **tokenize)
    base = prepare_base_model(ModelParameters(name_or_path="model"), SHORT, task=task)
    options = {"effective_batch_rows": 2, "max_steps": 1, **(train or {})}
    groups = TrainingGroups(TrainParameters(**options), ModelParameters(name_or_path="model"), seed=1, task=task)
    return gather_settings(folder, base, groups)


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of the default length would be refused first by models of so few positions."""
    monkeypatch.setattr("tests.pipelines.test_tokenize.EvaluateParameters", lambda: SHORT)


@pytest.mark.usefixtures("project")
def test_rows_longer_than_trained_positions_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    publish_splits("s2", LONG)
    save_gpt2(20)
    with pytest.raises(UserError) as caught, caplog.at_level(logging.WARNING):
        start_training()
    (problem,) = caught.value.problems
    assert "tokenize.max_length_tokens = 64" in problem and "the 20 positions of model" in problem
    assert "1 of 3 rows of the train split, the longest with" in problem
    assert "Longer than the 20 positions in the config of model: 1 of 3 rows of the train split" in caplog.text


@pytest.mark.usefixtures("project")
def test_rows_within_the_positions_pass_whatever_the_limit_is() -> None:
    save_gpt2(20)
    assert start_training(max_length_tokens=512).tokens_key
    publish_splits("s2", LONG)
    assert start_training(max_length_tokens=20).tokens_key


@pytest.mark.usefixtures("project")
def test_positions_that_are_computed_are_left_to_the_findings() -> None:
    publish_splits("s2", LONG)
    model = make_model()
    model.config.max_position_embeddings = 20
    save(model)
    assert start_training().tokens_key


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("row", "key"),
    [(("a" * 30, "b", None), "tokenize.max_length_tokens"), (("a", "b" * 30, None), "tokenize.max_target_tokens")],
)
def test_sources_and_targets_are_counted_apart(row: tuple[str, str, None], key: str) -> None:
    publish_splits("s2", [*ROWS, row], task="seq2seq_lm")
    save_bart(24)
    with pytest.raises(UserError) as caught:
        start_training("seq2seq_lm", max_target_tokens=48)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{key} = ") and "24 positions" in problem


@pytest.mark.usefixtures("project")
def test_evaluations_without_validation_rows_are_said(caplog: pytest.LogCaptureFixture) -> None:
    start_training(train={"eval_every_steps": 5})
    assert "train.eval_every_steps = 5 measures nothing" in caplog.text
    assert "split.validation or data.validation_path" in caplog.text
    caplog.clear()
    start_training()
    assert "measures nothing" not in caplog.text


def prepare(task: str = "causal_lm", **evaluate: Any) -> dict[str, Any]:
    return prepare_base_model(
        ModelParameters(name_or_path="model"), EvaluateParameters(**take_generation(evaluate)), task=task
    )


@pytest.mark.usefixtures("project")
def test_answers_that_leave_no_room_for_a_prompt_are_refused_before_reading() -> None:
    save_gpt2(20)
    with pytest.raises(UserError, match=r"evaluate.generation.max_new_tokens = 20 .* 20 positions.*at most 10"):
        prepare(max_new_tokens=20)
    prepare(max_new_tokens=19)
    prepare(max_new_tokens=20, num_generate_rows=0)
    prepare("sequence_classification", max_new_tokens=20)
    save_bart(24)
    with pytest.raises(UserError, match=r"evaluate.generation.max_new_tokens = 25 .* 24 positions.*at most 24"):
        prepare("seq2seq_lm", max_new_tokens=25)
    prepare("seq2seq_lm", max_new_tokens=24)


@pytest.mark.usefixtures("project")
def test_a_model_of_another_task_is_refused_before_the_rows_are_read() -> None:
    with pytest.raises(UserError, match=r"is a decoder alone, and task = seq2seq_lm"):
        prepare("seq2seq_lm")
    save_bart(64)
    with pytest.raises(UserError, match=r"is an encoder-decoder, and task = causal_lm"):
        prepare()
