"""Answers are those of transformers' own ``generate`` by the same settings, in float32, on models of several kinds."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from lm_tuning.generation import generate
from lm_tuning.generation.answers import Answer
from lm_tuning.generation.continuous_batching import ContinuousBatcher
from lm_tuning.generation.generate import generate_answers
from lm_tuning.generation.stop_strings import StopStrings
from lm_tuning.parameters.generation import GenerationParameters
from tests.generation.test_continuous_batching import ARCHITECTURES, LLAMA_SIZES, build
from tests.support.tiny import END, PAD, VOCABULARY, ids, make_model, make_tokenizer
from tests.support.tiny_tasks import make_seq2seq

NUM_NEW = 14
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "repetition penalty": {"repetition_penalty": 1.7},
    "n-grams of one": {"no_repeat_ngram_size": 1},
    "n-grams of two": {"no_repeat_ngram_size": 2},
    "n-grams of three": {"no_repeat_ngram_size": 3},
    "both": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "beams": {"num_beams": 3, "length_penalty": 2.0, "no_repeat_ngram_size": 2},
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    # Of few different tokens, so that sequences do come again.
    random = np.random.default_rng(5)
    return [random.integers(8, 14, length).tolist() for length in (3, 30, 7, 7, 12, 1, 19)]


def model_of(name: str) -> Any:
    if name == "encoder-decoder":
        model = make_seq2seq()
        # What it forces an answer to begin and end with is set aside here, and would not be by plain generate.
        model.generation_config = GenerationConfig(decoder_start_token_id=model.config.decoder_start_token_id)
    elif name == "windows":
        model = build("Mistral", **LLAMA_SIZES, sliding_window=8)
    else:
        model = build(name, **ARCHITECTURES[name])
    return model.eval()


def of_the_library(model: Any, prompt: list[int], *, stop_ids: list[int], **settings: Any) -> list[int]:
    """Answer one prompt by plain ``generate``: beside another one, padding would count as a token that has come."""
    tokenizer = settings.pop("tokenizer", None)
    config = GenerationConfig(
        do_sample=False, max_new_tokens=NUM_NEW, eos_token_id=stop_ids, pad_token_id=PAD, **settings
    )
    given = torch.tensor([prompt])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = model.generate(
            given, attention_mask=torch.ones_like(given), generation_config=config, tokenizer=tokenizer
        )
    answer: list[int] = output[0, 1 if model.config.is_encoder_decoder else len(prompt) :].tolist()
    return answer


def answer(model: Any, prompts: list[list[int]], **changes: Any) -> list[Answer]:
    options = {"batch_rows": 3, "stop_ids": [END], "pad_id": PAD, "device": "cpu", "tokenizer": make_tokenizer()}
    names = GenerationParameters.model_fields.keys() & changes.keys()
    generation = GenerationParameters(max_new_tokens=NUM_NEW, **{name: changes.pop(name) for name in names})
    return generate_answers(model, prompts, generation=generation, **{**options, **changes})


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("name", ["GPTNeoX", "Llama", "Phi3", "Qwen3", "windows", "encoder-decoder"])
def test_tokens_are_those_of_generate(name: str, settings: dict[str, Any], prompts: list[list[int]]) -> None:
    model = model_of(name)
    expected = []
    for prompt in prompts:
        tokens = of_the_library(model, prompt, stop_ids=[END], **settings)
        expected.append(tokens[: tokens.index(END)] if END in tokens else tokens)
    if settings and "beams" not in settings:
        plain = [one.ids for one in answer(model, prompts)]
        assert plain != expected, "the settings must change answers for this to prove anything"
    for batch_rows in (1, 3, 100):
        if name == "windows" and "repetition_penalty" in settings and batch_rows > 1:
            continue  # generate counts its padding as a token that has come
        assert [one.ids for one in answer(model, prompts, batch_rows=batch_rows, **settings)] == expected


@pytest.mark.parametrize("name", ["Llama", "windows", "encoder-decoder"])
@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.7}, {"do_sample": True, "temperature": 2.0}])
def test_probabilities_are_those_of_the_model_alone(
    name: str, settings: dict[str, Any], prompts: list[list[int]]
) -> None:
    model = model_of(name)
    stops = [int(one.ids[4]) for one in answer(model, prompts[:2], stop_ids=[], **settings)]
    answers = answer(model, prompts, stop_ids=stops, **settings)
    assert "stop" in {one.finish_reason for one in answers}
    for prompt, one in zip(prompts, answers, strict=True):
        found = []
        # Where a stop token came, it is counted too: which of the stops it was does not matter for this sum.
        for last in stops if one.finish_reason == "stop" else [None]:
            made = [*one.ids, *([] if last is None else [last])]
            found.append(log_prob_by_hand(model, prompt, made))
        assert min(abs(one.log_prob - each) for each in found) < 1e-3
    assert len({round(one.log_prob, 3) for one in answers}) > 3


def log_prob_by_hand(model: Any, prompt: list[int], made: list[int]) -> float:
    """Sum the logarithms over one forward pass with the whole answer."""
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            start = [model.config.decoder_start_token_id, *made[:-1]]
            logits = model(torch.tensor([prompt]), decoder_input_ids=torch.tensor([start])).logits[0]
        else:
            logits = model(torch.tensor([[*prompt, *made]])).logits[0, len(prompt) - 1 : -1]
    return float(logits.log_softmax(-1).gather(1, torch.tensor(made)[:, None]).sum())


def test_beams_tell_no_probability(prompts: list[list[int]]) -> None:
    answers = answer(make_model(), prompts, num_beams=2)
    assert [one.log_prob for one in answers] == [None] * len(prompts)


@pytest.mark.parametrize("name", ["Llama", "windows"])
@pytest.mark.parametrize("beams", [1, 2])
def test_stop_strings_end_answers_where_generate_ends_them(name: str, beams: int, prompts: list[list[int]]) -> None:
    model = model_of(name)
    tokenizer = make_tokenizer()
    free = [one.ids for one in answer(model, prompts, num_beams=beams)]
    # Two characters in the middle of an answer, and one that another one comes to and no special token has in its name.
    later = (tokenizer.decode(each) for each in free[1][4:])
    strings = [tokenizer.decode(free[0][3:5]), next(each for each in later if each.isupper() or each.isdigit())]
    answers = answer(model, prompts, num_beams=beams, stop_strings=strings)
    for prompt, one in zip(prompts, answers, strict=True):
        tokens = of_the_library(
            model, prompt, stop_ids=[END], num_beams=beams, stop_strings=strings, tokenizer=tokenizer
        )
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        ends = [text.index(each) for each in strings if each in text]
        if one.finish_reason == "stop_string":
            assert one.text == text[: min(ends)] == tokenizer.decode(one.ids)
        else:
            assert not ends
            assert one.text is None
    assert [one.finish_reason for one in answers].count("stop_string") >= 2


@pytest.mark.parametrize("steps", [1, 8])
def test_a_string_that_came_between_two_looks_cuts_what_follows(steps: int, prompts: list[list[int]]) -> None:
    model = build("Llama", **LLAMA_SIZES)
    tokenizer = make_tokenizer()
    free = [one.ids for one in answer(model, prompts, stop_ids=[])]
    string = tokenizer.decode(free[0][2:4])
    seen: dict[int, Answer] = {}
    answers = ContinuousBatcher(
        model,
        prompts,
        generation=GenerationParameters(max_new_tokens=NUM_NEW),
        most_rows=3,
        stop_ids=[],
        pad_id=PAD,
        device="cpu",
        stop_strings=StopStrings(tokenizer, [string]),
        steps_between_looks=steps,
        on_answer=seen.__setitem__,
    ).run(lambda: None)
    for one, made in zip(answers, free, strict=True):
        text = tokenizer.decode(made)
        assert tokenizer.decode(one.ids) == text.partition(string)[0]
        assert one.finish_reason == ("stop_string" if string in text else "length")
    assert [seen[index] for index in range(len(prompts))] == answers
    assert answers[0].ids == free[0][:2] or string in tokenizer.decode(free[0][:3])


def test_drawn_answers_depend_on_seed_and_row_and_on_nothing_else(prompts: list[list[int]]) -> None:
    for model in (build("Llama", **LLAMA_SIZES), build("Mistral", **LLAMA_SIZES, sliding_window=8)):
        settings = {"do_sample": True, "top_k": 20, "top_p": 0.95, "temperature": 1.3}
        first = [one.ids for one in answer(model, prompts, seed=3, **settings)]
        assert [one.ids for one in answer(model, prompts, seed=3, batch_rows=1, **settings)] == first
        assert [one.ids for one in answer(model, prompts, seed=4, **settings)] != first
        backwards = answer(model, prompts[::-1], row_ids=range(len(prompts))[::-1], seed=3, **settings)
        assert [one.ids for one in backwards] == first[::-1]
        # Equal prompts of different rows get different answers, and those of one row the same.
        twins = answer(model, [prompts[0]] * 3, row_ids=[7, 8, 7], seed=3, **settings)
        assert twins[0].ids == twins[2].ids != twins[1].ids


def test_both_ways_draw_the_same_tokens(prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Llama", **LLAMA_SIZES)
    settings = {"do_sample": True, "top_k": 20, "temperature": 1.3, "seed": 3}
    ours = answer(model, prompts, **settings)
    monkeypatch.setattr(generate, "takes_continuous_batches", lambda model: False)
    theirs = answer(model, prompts, **settings)
    assert [one.ids for one in theirs] == [one.ids for one in ours]
    assert [one.log_prob for one in theirs] == pytest.approx([one.log_prob for one in ours], abs=1e-4)


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="takes a tokenizer"):
        answer(make_model(), [ids("a")], stop_strings=["b"], tokenizer=None)
    assert len(VOCABULARY) > END
