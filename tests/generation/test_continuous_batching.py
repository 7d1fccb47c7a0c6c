"""Rows that end make room for others, and the answers are those of each prompt alone."""

from __future__ import annotations

import functools
import logging
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from lm_tuning.generation.continuous_batching import ContinuousBatcher, takes_continuous_batches
from lm_tuning.generation.sampling import draw_tokens, uniforms_of
from lm_tuning.parameters.generation import GenerationParameters
from tests.support.answers import answer_ids, cut_at, take_generation
from tests.support.tiny import PAD, VOCABULARY, make_model
from tests.support.tiny_tasks import make_seq2seq

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 96}
LLAMA_SIZES = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2}
ARCHITECTURES = {
    "Falcon": {**SIZES, "alibi": False},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96},
    "GPTNeoX": {**SIZES, "intermediate_size": 64},
    "Llama": LLAMA_SIZES,
    "OPT": {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "Phi3": {**LLAMA_SIZES, "sliding_window": None},
    "Qwen2": LLAMA_SIZES,
    "Qwen3": {**LLAMA_SIZES, "head_dim": 8},
}
NUM_NEW = 12

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def build(name: str, **sizes: Any) -> Any:
    """Return a random model whose answers vary from prompt to prompt."""
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": PAD}
    config = getattr(transformers, f"{name}Config")(vocab_size=len(VOCABULARY), **ends, **sizes)
    state = torch.random.get_rng_state()
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    torch.random.set_rng_state(state)
    return model


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("Llama", **LLAMA_SIZES)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = np.random.default_rng(11)
    return [random.integers(8, len(VOCABULARY), length).tolist() for length in (3, 30, 7, 7, 12, 1, 19, 2, 40, 5, 9)]


def alone(model: Any, prompt: list[int]) -> list[int]:
    """Keep the likeliest token again and again, without cache or padding."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(NUM_NEW):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def stops_that_vary(answers: list[list[int]]) -> list[int]:
    """Return tokens at which answers end after different numbers of tokens."""
    return sorted({answers[0][3], answers[1][0], answers[4][7]})


def batcher(model: Any, prompts: list[list[int]], **changes: Any) -> ContinuousBatcher:
    options = {"max_new_tokens": NUM_NEW, "most_rows": 3, "stop_ids": [], "pad_id": PAD, "device": "cpu"}
    return ContinuousBatcher(model, prompts, **take_generation({**options, **changes}))


def answer(model: Any, prompts: list[list[int]], **changes: Any) -> list[list[int]]:
    return [one.ids for one in batcher(model, prompts, **changes).run(lambda: None)]


class Calls:
    """What a model is called with, and an error at chosen calls."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch, *, most_rows: int = 1_000) -> None:
        self.shapes: list[tuple[int, int]] = []
        forward = model.forward

        @functools.wraps(forward)
        def spy(*, input_ids: torch.Tensor, **arguments: Any) -> Any:
            self.shapes.append((input_ids.shape[0], input_ids.shape[1]))
            if input_ids.shape[0] > most_rows:
                raise torch.OutOfMemoryError("out of memory, as a card says it")
            return forward(input_ids=input_ids, **arguments)

        monkeypatch.setattr(model, "forward", spy)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_answers_are_those_of_each_prompt_alone(name: str, prompts: list[list[int]]) -> None:
    model = build(name, **ARCHITECTURES[name])
    assert takes_continuous_batches(model)
    free = [alone(model, prompt) for prompt in prompts]
    assert len({tuple(one) for one in free}) > 3, "the answers must differ for this to prove anything"
    stops = stops_that_vary(free)
    expected = [cut_at(one, stops) for one in free]
    assert len({len(one) for one in expected}) > 2, "they must end at different times"
    for most_rows in (1, 3, 100):
        assert answer(model, prompts, stop_ids=stops, most_rows=most_rows) == expected
    assert answer(model, prompts) == free


def test_tokens_after_the_end_of_an_answer_are_not_kept(llama: Any, prompts: list[list[int]]) -> None:
    """As on a GPU, where rows go on for some steps before anybody looks whether they have ended."""
    free = answer(llama, prompts)
    stops = stops_that_vary(free)
    expected = [cut_at(one, stops) for one in free]
    for steps in (2, 5, 100):
        assert answer(llama, prompts, stop_ids=stops, steps_between_looks=steps) == expected
        assert answer(llama, prompts, steps_between_looks=steps) == free


def test_the_batch_stays_full_while_prompts_wait(
    llama: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stops = stops_that_vary(answer(llama, prompts))
    lengths = [len(one) for one in answer(llama, prompts, stop_ids=stops)]
    calls = Calls(llama, monkeypatch)
    answer(llama, prompts, stop_ids=stops, most_rows=4)
    # A step of one token for several rows; rows of prompts are longer, but for one of a single token.
    steps = [rows for rows, columns in calls.shapes if columns == 1]
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    in_batches = sum(max(lengths[index] for index in order[first : first + 4]) for first in range(0, len(order), 4))
    assert len(steps) < in_batches
    assert sum(steps) < 4 * in_batches


def test_out_of_memory_halves_the_batch_and_loses_nothing(
    llama: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = answer(llama, prompts)
    calls = Calls(llama, monkeypatch, most_rows=2)
    seen: list[int] = []
    decoder = batcher(llama, prompts, most_rows=8)
    with caplog.at_level(logging.WARNING):
        assert [one.ids for one in decoder.run(lambda: seen.append(decoder.num_tokens))] == expected
    assert decoder.most_rows == 2
    assert seen == sorted(seen)
    [warning] = [record.getMessage() for record in caplog.records]
    assert "Out of memory with 8 prompts answered at once: going on with 4" in warning
    assert "evaluate.generate_batch_rows" in warning
    assert max(rows for rows, _ in calls.shapes[3:]) <= 2


def test_out_of_memory_in_the_middle_of_answers_keeps_their_beginnings(
    llama: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer(llama, prompts)
    calls = Calls(llama, monkeypatch)
    forward, failed = llama.forward, []

    @functools.wraps(forward)
    def fail_once(**arguments: Any) -> Any:
        if len(calls.shapes) == 6 and not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("out of memory, as a card says it")
        return forward(**arguments)

    monkeypatch.setattr(llama, "forward", fail_once)
    assert answer(llama, prompts, most_rows=4) == expected
    assert failed
    # What had been answered until then went back in with its prompt.
    longest = sorted((len(prompt) for prompt in prompts), reverse=True)
    assert max(columns for _, columns in calls.shapes[6:]) > longest[0]


def test_lanes_that_grew_too_many_become_fewer_again(
    llama: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """How many rows the memory holds is told once, of the longest kind; more of a shorter kind may be too many."""
    random = np.random.default_rng(3)
    prompts = [random.integers(8, len(VOCABULARY), length).tolist() for length in (80, *[4] * 20)]
    expected = answer(llama, prompts)
    Calls(llama, monkeypatch, most_rows=3)
    decoder = batcher(llama, prompts, most_rows=1)
    # Room for one row of the longest kind, of 92 columns, and so for five of 16.
    decoder._cache_bytes = 92 * 2 * 2 * 2 * 8 * 4
    with caplog.at_level(logging.WARNING):
        assert [one.ids for one in decoder.run(lambda: None)] == expected
    [warning] = [record.getMessage() for record in caplog.records]
    assert "Out of memory with 5 prompts answered at once: going on with 2" in warning


def test_a_single_row_that_does_not_fit_is_an_error(
    llama: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    Calls(llama, monkeypatch, most_rows=0)
    with pytest.raises(torch.OutOfMemoryError):
        answer(llama, prompts, most_rows=4)


def test_progress_counts_up_to_its_end(llama: Any, prompts: list[list[int]]) -> None:
    stops = stops_that_vary(answer(llama, prompts))
    decoder = batcher(llama, prompts, stop_ids=stops)
    assert (decoder.num_tokens, decoder.most_tokens) == (0, len(prompts) * NUM_NEW)
    seen: list[tuple[int, int]] = []
    answers = decoder.run(lambda: seen.append((decoder.num_tokens, decoder.most_tokens)))
    assert seen[-1] == (sum(len(one.ids) for one in answers),) * 2
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert [most for _, most in seen] == sorted((most for _, most in seen), reverse=True)


@pytest.mark.parametrize("free_rows", [3, 40, 100_000])
def test_rows_on_a_gpu_are_those_that_its_memory_holds(
    llama: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, free_rows: int
) -> None:
    longest = max(map(len, prompts)) + NUM_NEW
    # Keys and values of two layers, two heads of eight numbers, in float32.
    bytes_per_row = longest * 2 * 2 * 2 * 8 * 4
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free_rows * bytes_per_row / 0.5), 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    # What the first rows hold is asked for before it is looked at, so it is told as allocated.
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: len(prompts) * bytes_per_row)
    decoder = batcher(llama, prompts, most_rows=None)
    assert decoder.most_rows == 16
    decoder.most_rows = None
    decoder.run(lambda: None)
    assert decoder.most_rows is not None
    assert abs(decoder.most_rows - min(free_rows, 256)) <= 3


def test_other_caches_and_models_are_left_to_generate(prompts: list[list[int]]) -> None:
    windowed = build("Mistral", **LLAMA_SIZES, sliding_window=8)
    assert not takes_continuous_batches(windowed)
    assert not takes_continuous_batches(build("Bloom", hidden_size=32, n_layer=2, n_head=4))
    assert not takes_continuous_batches(make_seq2seq())
    assert takes_continuous_batches(make_model())
    options = {"max_new_tokens": NUM_NEW, "stop_ids": [], "pad_id": PAD, "device": "cpu"}
    expected = [alone(windowed, prompt) for prompt in prompts]
    assert answer_ids(windowed, prompts, batch_rows=None, **options) == expected


@pytest.mark.parametrize("name", ["GPTNeoX", "Llama", "Phi3", "Qwen2", "Qwen3"])
def test_packed_prompts_and_parts_of_lanes_give_the_same_answers(name: str, prompts: list[list[int]]) -> None:
    """As on a GPU, where kernels read both; here PyTorch's attention stands in for them."""
    model = build(name, **ARCHITECTURES[name])
    implementation = model.config._attn_implementation
    free = [alone(model, prompt) for prompt in prompts]
    stops = stops_that_vary(free)
    for most_rows, steps in ((1, 1), (3, 5), (100, 8)):
        answers = answer(model, prompts, stop_ids=stops, most_rows=most_rows, steps_between_looks=steps, packs=True)
        assert answers == [cut_at(one, stops) for one in free]
    assert model.config._attn_implementation == implementation


def test_lanes_grow_narrower_and_more_once_the_longest_prompts_are_done(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One long prompt does not decide how many short ones are answered at once."""
    random = np.random.default_rng(3)
    prompts = [random.integers(8, len(VOCABULARY), length).tolist() for length in (80, *[4] * 40)]
    expected = answer(llama, prompts)
    # Room for two rows of the longest kind, of 92 columns, and so for eleven of 16.
    bytes_per_column = 2 * 2 * 2 * 8 * 4
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(2 * 92 * bytes_per_column / 0.5), 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 16 * 92 * bytes_per_column)
    calls = Calls(llama, monkeypatch)
    decoder = batcher(llama, prompts, most_rows=None)
    decoder.most_rows = None
    assert [one.ids for one in decoder.run(lambda: None)] == expected
    steps = [rows for rows, columns in calls.shapes if columns == 1]
    # The first prompts stand beside the long one before the memory is looked at.
    assert max(steps) > 16 or steps.count(11) > 0
    assert decoder.most_rows == 2


def test_tokens_are_drawn_with_the_probabilities_that_sampling_leaves(llama: Any) -> None:
    logits = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.1])).repeat(20_000, 1)

    uniforms = torch.from_numpy(uniforms_of(1, 0, len(logits)))

    def shares(**settings: Any) -> list[float]:
        tokens = draw_tokens(logits, uniforms, GenerationParameters(do_sample=True, **settings))
        return (torch.bincount(tokens, minlength=4) / len(logits)).tolist()

    assert shares() == pytest.approx([0.5, 0.25, 0.15, 0.1], abs=0.02)
    assert shares(top_k=2) == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=0.02)
    # The first two sum up to 0.75; the third is where 0.8 is passed.
    assert shares(top_p=0.8) == pytest.approx([0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0], abs=0.02)
    assert shares(top_p=0.1) == [1, 0, 0, 0]
    squared = np.array([0.5, 0.25, 0.15, 0.1]) ** 2
    assert shares(temperature=0.5) == pytest.approx(list(squared / squared.sum()), abs=0.02)
    assert shares(top_k=100) == shares()


def test_drawn_answers_are_the_same_again_and_others_with_another_seed(llama: Any, prompts: list[list[int]]) -> None:
    first = answer(llama, prompts, do_sample=True, seed=1)
    before = torch.random.get_rng_state()
    assert answer(llama, prompts, do_sample=True, seed=1) == first
    assert answer(llama, prompts, do_sample=True, seed=2) != first
    assert answer(llama, prompts, do_sample=True, seed=1, top_k=1) == answer(llama, prompts)
    assert torch.equal(torch.random.get_rng_state(), before)
    options = {"max_new_tokens": NUM_NEW, "batch_rows": 3, "stop_ids": [], "pad_id": PAD, "device": "cpu"}
    assert answer_ids(llama, prompts, do_sample=True, seed=1, **options) == first


def test_generate_of_the_library_draws_by_the_same_settings(prompts: list[list[int]]) -> None:
    windowed = build("Mistral", **LLAMA_SIZES, sliding_window=8)
    options = {"max_new_tokens": NUM_NEW, "batch_rows": 3, "stop_ids": [], "pad_id": PAD, "device": "cpu"}
    first = answer_ids(windowed, prompts, do_sample=True, seed=1, **options)
    before = torch.random.get_rng_state()
    assert answer_ids(windowed, prompts, do_sample=True, seed=1, **options) == first
    assert answer_ids(windowed, prompts, do_sample=True, seed=2, **options) != first
    likeliest = answer_ids(windowed, prompts, **options)
    assert answer_ids(windowed, prompts, do_sample=True, seed=1, top_k=1, **options) == likeliest
    assert torch.equal(torch.random.get_rng_state(), before)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("packs", [None, False])
def test_answers_on_a_gpu_are_those_of_a_cpu(prompts: list[list[int]], packs: bool | None) -> None:
    """Lanes given away, rows left out, graphs of several sizes; in float32 the same tokens."""
    model = build("Llama", **LLAMA_SIZES)
    free = [alone(model, prompt) for prompt in prompts]
    stops = stops_that_vary(free)
    model.to("cuda")
    for most_rows, steps in ((2, 1), (4, 3), (100, 8)):
        options = {"device": "cuda", "most_rows": most_rows, "steps_between_looks": steps, "packs": packs}
        decoder = batcher(model, prompts, stop_ids=stops, **options)
        assert decoder.run(lambda: None) == [cut_at(one, stops) for one in free]
        assert decoder._decoder is not None
        assert decoder._decoder._failure is None
        assert answer(model, prompts, **options) == free
    assert answer(model, prompts, device="cuda", most_rows=None) == free


@needs_gpu
@pytest.mark.gpu
def test_a_step_that_cannot_be_recorded_runs_as_it_is(
    prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = build("Llama", **LLAMA_SIZES)
    expected = [alone(model, prompt) for prompt in prompts]
    model.to("cuda")
    forward = model.forward

    @functools.wraps(forward)
    def wait_for_the_device(**arguments: Any) -> Any:
        float(arguments["input_ids"].sum())
        return forward(**arguments)

    monkeypatch.setattr(model, "forward", wait_for_the_device)
    with caplog.at_level(logging.INFO):
        assert answer(model, prompts, device="cuda", most_rows=100) == expected
    assert "Answers are made without a CUDA graph, so slower:" in caplog.text


@needs_gpu
@pytest.mark.gpu
def test_kernels_and_graphs_in_16_bits_answer_nearly_as_plain_steps_do() -> None:
    sizes = {**LLAMA_SIZES, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = build("Qwen3", **sizes, head_dim=32).to("cuda", torch.bfloat16)
    random = np.random.default_rng(1)
    many = [random.integers(8, len(VOCABULARY), length).tolist() for length in random.integers(1, 60, 300)]
    options = {"max_new_tokens": NUM_NEW, "stop_ids": [], "pad_id": PAD, "device": "cuda"}
    decoder = batcher(model, many, most_rows=None, **options)
    assert decoder._packs
    answers = [one.ids for one in decoder.run(lambda: None)]
    plain = answer(model, many, most_rows=16, packs=False, **options)
    # The first token of an answer sees the prompt alone; later ones depend on those before.
    assert np.mean([one[0] == other[0] for one, other in zip(answers, plain, strict=True)]) > 0.9
    assert answer(model, many, most_rows=16, do_sample=True, seed=1, **options) != answers
