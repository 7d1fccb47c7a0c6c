"""Greedy answers do not depend on the batch, and stop where a turn ends."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lm_tuning.evaluation.generation import (
    collect_prompts,
    cut_at,
    find_stop_ids,
    generate_answers,
    pad_left,
)
from lm_tuning.text.token_table import TokenTable
from tests.support.tiny import ASSISTANT, BOS, END, EOS, PAD, USER, VOCABULARY, ids, make_model, make_tokenizer

WriteTable = Callable[..., TokenTable]


def greedy_by_hand(model: Any, prompt: list[int], max_new_tokens: int, stop_ids: list[int]) -> list[int]:
    """Take the likeliest token again and again, without cache or padding."""
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        with torch.no_grad():
            following = int(model(torch.tensor([tokens])).logits[0, -1].argmax())
        if following in stop_ids:
            break
        tokens.append(following)
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def model() -> Any:
    """A model with larger weights than at its start, so that its answers vary from prompt to prompt."""
    model = make_model(tied=False)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.integers(8, len(VOCABULARY), length).tolist() for length in (3, 30, 7, 7, 12, 1, 19)]


def options(**changes: Any) -> dict[str, Any]:
    return {"max_new_tokens": 12, "batch_rows": 4, "stop_ids": [END], "pad_id": PAD, "device": "cpu", **changes}


def test_batched_equals_alone_equals_by_hand(model: Any, prompts: list[list[int]]) -> None:
    by_hand = [greedy_by_hand(model, prompt, 12, [END]) for prompt in prompts]
    alone = [generate_answers(model, [prompt], **options())[0] for prompt in prompts]
    batched = generate_answers(model, prompts, **options())
    assert len({tuple(answer) for answer in by_hand}) > 3, "the answers must differ for this to prove anything"
    assert alone == by_hand
    assert batched == by_hand
    assert generate_answers(model, prompts, **options(batch_rows=100)) == by_hand


def test_a_pad_id_that_is_a_stop_id_changes_nothing(model: Any, prompts: list[list[int]]) -> None:
    expected = generate_answers(model, prompts, **options())
    assert generate_answers(model, prompts, **options(pad_id=END)) == expected


def test_stops_at_each_stop_id_without_keeping_it(model: Any, prompts: list[list[int]]) -> None:
    free = generate_answers(model, prompts, **options(stop_ids=[]))
    assert all(len(answer) == 12 for answer in free)
    stops = [free[0][4], free[1][2]]
    stopped = generate_answers(model, prompts, **options(stop_ids=stops))
    assert stopped == [cut_at(answer, stops) for answer in free]
    assert len(stopped[0]) <= 4
    assert len(stopped[1]) <= 2


def test_results_come_in_the_order_of_the_prompts(model: Any, prompts: list[list[int]]) -> None:
    forward = generate_answers(model, prompts, **options(batch_rows=2))
    assert generate_answers(model, prompts[::-1], **options(batch_rows=2)) == forward[::-1]


def test_sampling_settings_of_the_model_are_set_aside_without_warnings(
    model: Any, prompts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    expected = generate_answers(model, prompts, **options())
    before = model.generation_config
    # What a published chat model may come with: sampling, and values that make no sense without it.
    model.generation_config = type(before)(
        do_sample=True, temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.5, no_repeat_ngram_size=2
    )
    settings = model.generation_config
    settings.max_length = 8
    transformers_logger = logging.getLogger("transformers")
    propagate, transformers_logger.propagate = transformers_logger.propagate, True
    try:
        with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
            warnings.simplefilter("error")
            assert generate_answers(model, prompts, **options()) == expected
        assert not caplog.records
        assert model.generation_config is settings
    finally:
        model.generation_config = before
        transformers_logger.propagate = propagate


def test_works_through_an_adapter_and_leaves_the_model_as_it_was(prompts: list[list[int]]) -> None:
    from peft import LoraConfig, get_peft_model

    base = make_model()
    plain = generate_answers(base, prompts, **options())
    model = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.train()
    model.config.use_cache = False
    settings = (model.generation_config, model.get_base_model().generation_config)

    assert generate_answers(model, prompts, **options()) == plain  # a fresh adapter changes nothing

    assert model.training
    assert model.config.use_cache is False
    assert (model.generation_config, model.get_base_model().generation_config) == settings


def test_a_prompt_beyond_the_context_loses_its_start(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    context = model.config.max_position_embeddings
    long = np.random.default_rng(1).integers(8, len(VOCABULARY), context + 30).tolist()
    with caplog.at_level(logging.WARNING):
        answer = generate_answers(model, [long, [9, 10]], **options(max_new_tokens=5, stop_ids=[]))
    assert answer[0] == greedy_by_hand(model, long[-(context - 5) :], 5, [])
    assert answer[1] == greedy_by_hand(model, [9, 10], 5, [])
    assert "1 prompts were too long" in caplog.text


def test_progress_counts_the_tokens_of_answers_one_by_one(model: Any, prompts: list[list[int]]) -> None:
    seen: list[tuple[str, int, int | None, str]] = []
    report: Any = {"on_progress": lambda *event: seen.append(event), "label": "Answering"}
    generate_answers(model, prompts, **options(max_new_tokens=3, stop_ids=[]), **report)
    # Seven prompts in batches of four and three.
    assert seen == [("Answering", done, 21, "tokens") for done in (0, 4, 8, 12, 15, 18, 21)]


def test_progress_leaves_out_what_answers_that_end_early_do_not_need(model: Any, prompts: list[list[int]]) -> None:
    free = generate_answers(model, prompts, **options(stop_ids=[]))
    stop = free[0][2]  # the first answer ends at its third token, or before it
    seen: list[tuple[int, int | None]] = []
    settings = options(stop_ids=[stop], on_progress=lambda _, done, total, unit: seen.append((done, total)))
    answers = generate_answers(model, prompts, **settings)
    num_tokens = sum(map(len, answers))
    assert num_tokens < 7 * 12
    assert seen[0] == (0, 7 * 12)
    assert seen[-1] == (num_tokens, num_tokens)
    totals = [total for _, total in seen]
    assert totals == sorted(totals, reverse=True)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert all(done < total for done, total in seen[:-1])


def test_padding_stands_left_and_its_mask_comes_from_lengths() -> None:
    input_ids, attention_mask = pad_left([[PAD, 9], [9, 10, 11]], pad_id=PAD)
    assert input_ids.tolist() == [[PAD, PAD, 9], [9, 10, 11]]
    assert attention_mask.tolist() == [[0, 1, 1], [1, 1, 1]]


def test_prompts_end_where_the_last_answer_begins(write_table: WriteTable) -> None:
    conversation = [USER, *ids("hi"), END, ASSISTANT, *ids("yo"), END, USER, *ids("?"), END, ASSISTANT, *ids("ok"), END]
    table = write_table(
        [
            (conversation, [(5, 8), (12, 15)]),
            ([BOS, *ids("plain text"), END], [(0, 12)]),
            ([USER, *ids("a"), END, ASSISTANT, *ids("b"), END], [(4, 6)]),
            ([USER, *ids("a"), END], []),
        ]
    )
    prompts = collect_prompts(table, range(4))
    assert [prompt.row_id for prompt in prompts] == [100, 102]
    assert prompts[0].input_ids == conversation[:12]
    assert prompts[0].reference_ids == [*ids("ok"), END]
    assert prompts[1].input_ids == [USER, *ids("a"), END, ASSISTANT]


def test_stop_ids_are_the_end_tokens_and_the_end_of_a_turn(write_table: WriteTable) -> None:
    tokenizer = make_tokenizer(eos_token="<eos>")
    model = make_model()
    model.generation_config.eos_token_id = None
    with_newline = write_table([([USER, *ids("a"), END, ASSISTANT, *ids("b"), END, *ids("\n")], [(4, 7)])])
    assert find_stop_ids(model, tokenizer, collect_prompts(with_newline, [0])) == [EOS, END]
    assert find_stop_ids(model, tokenizer, []) == [EOS]
    model.generation_config.eos_token_id = [ASSISTANT, EOS]
    assert find_stop_ids(model, tokenizer, []) == sorted([EOS, ASSISTANT])


def test_a_truncated_answer_adds_no_stop_id(write_table: WriteTable) -> None:
    table = write_table([([USER, *ids("a"), END, ASSISTANT, *ids("long answer")], [(4, 15)])])
    model = make_model()
    model.generation_config.eos_token_id = None
    assert find_stop_ids(model, make_tokenizer(eos_token="<eos>"), collect_prompts(table, [0])) == [EOS]
