"""Answers do not depend on the batch, and stop where a turn ends."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm_tuning.errors import UserError
from lm_tuning.generation.generate import (
    collect_prompts,
    find_first_id,
    find_stop_ids,
)
from lm_tuning.generation.reading_prompts import pad_prompts
from lm_tuning.text.decoding import special_ids
from lm_tuning.text.store.table import TokenTable
from tests.support.answers import answer_ids, cut_at
from tests.support.tiny import ASSISTANT, BOS, END, EOS, PAD, SYSTEM, USER, VOCABULARY, ids, make_model, make_tokenizer
from tests.support.tiny_tasks import make_seq2seq, write_pairs

WriteTable = Callable[..., TokenTable]


def greedy_by_hand(model: Any, prompt: list[int], max_new_tokens: int, stop_ids: list[int]) -> list[int]:
    """Keep the likeliest token again and again, without cache or padding."""
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
    alone = [answer_ids(model, [prompt], **options())[0] for prompt in prompts]
    batched = answer_ids(model, prompts, **options())
    assert len({tuple(answer) for answer in by_hand}) > 3, "the answers must differ for this to prove anything"
    assert alone == by_hand
    assert batched == by_hand
    assert answer_ids(model, prompts, **options(batch_rows=100)) == by_hand


def test_a_pad_id_that_is_a_stop_id_changes_nothing(model: Any, prompts: list[list[int]]) -> None:
    expected = answer_ids(model, prompts, **options())
    assert answer_ids(model, prompts, **options(pad_id=END)) == expected


def test_stops_at_each_stop_id_without_keeping_it(model: Any, prompts: list[list[int]]) -> None:
    free = answer_ids(model, prompts, **options(stop_ids=[]))
    assert all(len(answer) == 12 for answer in free)
    stops = [free[0][4], free[1][2]]
    stopped = answer_ids(model, prompts, **options(stop_ids=stops))
    assert stopped == [cut_at(answer, stops) for answer in free]
    assert len(stopped[0]) <= 4
    assert len(stopped[1]) <= 2


def test_results_come_in_the_order_of_the_prompts(model: Any, prompts: list[list[int]]) -> None:
    forward = answer_ids(model, prompts, **options(batch_rows=2))
    assert answer_ids(model, prompts[::-1], **options(batch_rows=2)) == forward[::-1]


def test_sampling_settings_of_the_model_are_set_aside_without_warnings(
    model: Any, prompts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    expected = answer_ids(model, prompts, **options())
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
            assert answer_ids(model, prompts, **options()) == expected
        assert not caplog.records
        assert model.generation_config is settings
    finally:
        model.generation_config = before
        transformers_logger.propagate = propagate


def test_works_through_an_adapter_and_leaves_the_model_as_it_was(prompts: list[list[int]]) -> None:
    from peft import LoraConfig, get_peft_model

    base = make_model()
    plain = answer_ids(base, prompts, **options())
    model = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.train()
    model.config.use_cache = False
    settings = (model.generation_config, model.get_base_model().generation_config)

    assert answer_ids(model, prompts, **options()) == plain  # a fresh adapter changes nothing

    assert model.training
    assert model.config.use_cache is False
    assert (model.generation_config, model.get_base_model().generation_config) == settings


def test_a_prompt_beyond_the_context_loses_its_middle(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    context = model.config.max_position_embeddings
    long = np.random.default_rng(1).integers(8, len(VOCABULARY), context + 30).tolist()
    with caplog.at_level(logging.WARNING):
        answer = answer_ids(model, [long, [9, 10]], **options(max_new_tokens=5, stop_ids=[]))
    half = (context - 5) // 2
    assert answer[0] == greedy_by_hand(model, [*long[: context - 5 - half], *long[-half:]], 5, [])
    assert answer[1] == greedy_by_hand(model, [9, 10], 5, [])
    assert "Too long to answer, so cut in the middle: 1 prompt;" in caplog.text


def test_a_prompt_beyond_the_context_keeps_its_roles_and_its_short_turns(model: Any) -> None:
    room = model.config.max_position_embeddings - 5
    system, question = [SYSTEM, *ids("Be brief."), END, USER], [END, ASSISTANT]
    text = np.random.default_rng(1).integers(8, len(VOCABULARY), room).tolist()
    kept = room - len(system) - len(question)
    special = special_ids(make_tokenizer())
    limits = options(max_new_tokens=5, stop_ids=[])
    (answer,) = answer_ids(model, [[*system, *text, *question]], **limits, special_ids=special)
    whole = [*system, *text[: kept - kept // 2], *text[-(kept // 2) :], *question]
    assert (len(whole), answer) == (room, greedy_by_hand(model, whole, 5, []))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([], []),  # plain text: prompt and response
        ([USER], [END, ASSISTANT]),  # a turn of a conversation
        ([SYSTEM, *ids("Be brief."), END, USER, *ids("Hi"), END, ASSISTANT, *ids("Yo"), END, USER], [END, ASSISTANT]),
    ],
)
def test_a_long_document_keeps_its_instruction_and_the_header_of_the_answer(
    model: Any, before: list[int], after: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    forward = model.forward

    @functools.wraps(forward)
    def note(*, input_ids: torch.Tensor, **arguments: Any) -> Any:
        seen.append(input_ids[0].tolist())
        return forward(input_ids=input_ids, **arguments)

    monkeypatch.setattr(model, "forward", note)
    context = model.config.max_position_embeddings
    prompt = [*before, *ids("Sum up this:\n" + "word " * context + "\nSummary:\n"), *after]
    answer_ids(model, [prompt], **options(max_new_tokens=5), special_ids=special_ids(make_tokenizer()))
    read = seen[0]
    assert len(read) == context - 5
    assert read[: len(before) + 13] == [*before, *ids("Sum up this:\n")]
    assert read[-(len(after) + 10) :] == [*ids("\nSummary:\n"), *after]


def test_progress_counts_the_tokens_of_answers_one_by_one(model: Any, prompts: list[list[int]]) -> None:
    seen: list[tuple[str, int, int | None, str]] = []
    report: Any = {"on_progress": lambda *event: seen.append(event), "label": "Answering"}
    answer_ids(model, prompts, **options(max_new_tokens=3, stop_ids=[]), **report)
    # Seven prompts in batches of four and three.
    assert seen == [("Answering", done, 21, "tokens") for done in (0, 4, 8, 12, 15, 18, 21)]


def test_progress_leaves_out_what_answers_that_end_early_do_not_need(model: Any, prompts: list[list[int]]) -> None:
    free = answer_ids(model, prompts, **options(stop_ids=[]))
    stop = free[0][2]  # the first answer ends at its third token, or before it
    seen: list[tuple[int, int | None]] = []
    settings = options(stop_ids=[stop], on_progress=lambda _, done, total, unit: seen.append((done, total)))
    answers = answer_ids(model, prompts, **settings)
    num_tokens = sum(map(len, answers))
    assert num_tokens < 7 * 12
    assert seen[0] == (0, 7 * 12)
    assert seen[-1] == (num_tokens, num_tokens)
    totals = [total for _, total in seen]
    assert totals == sorted(totals, reverse=True)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert all(done < total for done, total in seen[:-1])


def test_padding_stands_where_it_is_wanted_and_its_mask_comes_from_lengths() -> None:
    input_ids, attention_mask = pad_prompts([[PAD, 9], [9, 10, 11]], pad_id=PAD, side="left")
    assert input_ids.tolist() == [[PAD, PAD, 9], [9, 10, 11]]
    assert attention_mask.tolist() == [[0, 1, 1], [1, 1, 1]]
    input_ids, attention_mask = pad_prompts([[9, PAD], [9, 10, 11]], pad_id=PAD, side="right")
    assert input_ids.tolist() == [[9, PAD, PAD], [9, 10, 11]]
    assert attention_mask.tolist() == [[1, 1, 0], [1, 1, 1]]


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


def test_stop_ids_are_the_eos_and_the_end_of_a_turn(write_table: WriteTable) -> None:
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


def best_pair(log_probabilities: Callable[[list[int]], torch.Tensor]) -> tuple[list[int], float]:
    """Find the likeliest two tokens among all pairs, by trying each first one."""
    first = log_probabilities([])
    seconds = torch.stack([log_probabilities([token]) for token in range(len(first))])
    total = first[:, None] + seconds
    index = int(total.argmax())
    return [index // len(first), index % len(first)], float(total.max())


def test_beams_find_the_likeliest_answer_of_all(model: Any, prompts: list[list[int]]) -> None:
    """With as many beams as tokens, no beginning is dropped, so the answer is the likeliest of all pairs."""

    def scorer(prompt: list[int]) -> Callable[[list[int]], torch.Tensor]:
        def score(begun: list[int]) -> torch.Tensor:
            with torch.no_grad():
                return torch.log_softmax(model(torch.tensor([[*prompt, *begun]])).logits[0, -1].double(), -1)

        return score

    greedy = answer_ids(model, prompts, **options(max_new_tokens=2, stop_ids=[]))
    beams = answer_ids(
        model, prompts, **options(max_new_tokens=2, stop_ids=[], num_beams=len(VOCABULARY), batch_rows=2)
    )
    assert beams == [best_pair(scorer(prompt))[0] for prompt in prompts]
    assert beams != greedy, "some answer must differ for this to prove anything"


def test_one_beam_is_greedy_and_beams_do_not_depend_on_the_batch(model: Any, prompts: list[list[int]]) -> None:
    assert answer_ids(model, prompts, **options(num_beams=1)) == answer_ids(model, prompts, **options())
    together = answer_ids(model, prompts, **options(num_beams=3))
    assert together == [answer_ids(model, [prompt], **options(num_beams=3))[0] for prompt in prompts]


def test_beams_become_fewer_rows_for_lack_of_memory(
    model: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = answer_ids(model, prompts, **options(num_beams=2))
    forward = model.forward

    @functools.wraps(forward)
    def fail(*, input_ids: torch.Tensor, **arguments: Any) -> Any:
        # In the middle of answers, whose tokens are counted by then; a row has two beams.
        if len(input_ids) > 2 and input_ids.shape[1] == 1:
            raise torch.OutOfMemoryError("out of memory, as a card says it")
        return forward(input_ids=input_ids, **arguments)

    monkeypatch.setattr(model, "forward", fail)
    seen: list[tuple[int, int | None]] = []
    with caplog.at_level(logging.WARNING):
        answers = answer_ids(
            model,
            prompts,
            **options(num_beams=2),
            on_progress=lambda label, done, total, unit: seen.append((done, total)),
        )
    assert answers == expected
    assert seen[-1][0] == seen[-1][1]
    [warning] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "Out of memory with 4 prompts answered at once: going on with 2" in warning
    monkeypatch.setattr(model, "forward", lambda **arguments: fail(**{**arguments, "input_ids": torch.zeros(4, 1)}))
    with pytest.raises(torch.OutOfMemoryError):
        answer_ids(model, prompts, **options(num_beams=2))


def test_progress_of_beams_reaches_its_end(model: Any, prompts: list[list[int]]) -> None:
    free = answer_ids(model, prompts, **options(num_beams=2, stop_ids=[]))
    seen: list[tuple[int, int | None]] = []
    settings = options(
        num_beams=2, stop_ids=[free[0][1]], on_progress=lambda _, done, total, unit: seen.append((done, total))
    )
    answer_ids(model, prompts, **settings)
    assert seen[0] == (0, 7 * 12)
    assert seen[-1][0] == seen[-1][1]
    assert all(done <= total for done, total in seen if total is not None)


@pytest.fixture(scope="module")
def reader() -> Any:
    return make_seq2seq()


def sources() -> list[list[int]]:
    random = np.random.default_rng(5)
    return [[*random.integers(8, len(VOCABULARY), length).tolist(), EOS] for length in (3, 30, 7, 0, 12)]


def reader_scores(reader: Any, source: list[int], begun: list[int]) -> torch.Tensor:
    given = torch.tensor([[reader.config.decoder_start_token_id, *begun]])
    with torch.no_grad():
        logits = reader(input_ids=torch.tensor([source]), decoder_input_ids=given).logits[0, -1].double()
    return torch.log_softmax(logits, -1)


def test_an_encoder_decoder_answers_as_by_hand_whatever_the_batch(reader: Any) -> None:
    by_hand = []
    for source in sources():
        answer: list[int] = []
        while len(answer) < 12 and (token := int(reader_scores(reader, source, answer).argmax())) != EOS:
            answer.append(token)
        by_hand.append(answer)
    assert len({tuple(answer) for answer in by_hand}) > 2, "the answers must differ for this to prove anything"
    settings = options(stop_ids=[EOS])
    assert [answer_ids(reader, [source], **settings)[0] for source in sources()] == by_hand
    assert answer_ids(reader, sources(), **settings) == by_hand


def test_beams_of_an_encoder_decoder_find_the_likeliest_answer(reader: Any) -> None:
    settings = options(max_new_tokens=2, stop_ids=[], num_beams=len(VOCABULARY), batch_rows=2)
    expected = [best_pair(lambda begun, source=source: reader_scores(reader, source, begun))[0] for source in sources()]
    assert answer_ids(reader, sources(), **settings) == expected


def test_an_encoder_decoders_own_settings_are_set_aside(reader: Any) -> None:
    settings = options(stop_ids=[EOS], num_beams=2)
    expected = answer_ids(reader, sources(), **settings)
    before = reader.generation_config
    reader.generation_config = type(before)(
        num_beams=4,
        length_penalty=2.0,
        no_repeat_ngram_size=1,
        min_length=10,
        forced_bos_token_id=BOS,
        decoder_start_token_id=PAD,
    )
    own = reader.generation_config
    try:
        assert answer_ids(reader, sources(), **settings) == expected
        assert reader.generation_config is own
    finally:
        reader.generation_config = before


def test_an_answer_begins_with_the_token_that_it_is_told_to(reader: Any) -> None:
    settings = options(stop_ids=[], max_new_tokens=4, first_id=BOS)
    answers = answer_ids(reader, sources(), **settings)
    assert [answer[0] for answer in answers] == [BOS] * 5
    expected = [int(reader_scores(reader, source, [BOS]).argmax()) for source in sources()]
    assert [answer[1] for answer in answers] == expected


def test_the_first_token_is_read_off_the_answers(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(eos_token="<eos>")
    pairs = [("a", "b"), ("c", "d")]
    with_start = collect_prompts(write_pairs(pairs, tmp_path / "start.arrow", has_bos=True), range(2))
    assert find_first_id(tokenizer, with_start, stop_ids=[EOS]) == BOS
    plain = collect_prompts(write_pairs(pairs, tmp_path / "plain.arrow"), range(2))
    assert find_first_id(tokenizer, plain, stop_ids=[EOS]) is None
    assert find_first_id(tokenizer, plain[:1], stop_ids=[EOS]) is None, "an ordinary token is never forced"
    empty = collect_prompts(write_pairs([("a", ""), ("bc", "")], tmp_path / "empty.arrow"), range(2))
    assert find_first_id(tokenizer, empty, stop_ids=[EOS]) is None, "an answer is not made to end at once"
    assert find_first_id(tokenizer, [], stop_ids=[EOS]) is None


def test_a_source_has_the_whole_context_and_so_has_the_answer(caplog: pytest.LogCaptureFixture) -> None:
    reader = make_seq2seq(max_positions=16)
    long = [*sources()[1][:20], EOS]
    with caplog.at_level(logging.WARNING):
        (answer,) = answer_ids(reader, [long], **options(max_new_tokens=16, stop_ids=[]))
    assert len(answer) == 16
    assert answer == answer_ids(reader, [[*long[:8], *long[-8:]]], **options(max_new_tokens=16, stop_ids=[]))[0]
    assert "cut in the middle: 1 prompt;" in caplog.text
    with pytest.raises(UserError, match=r"evaluate.generation.max_new_tokens = 17 .* 16 positions.*at most 16"):
        answer_ids(reader, [long], **options(max_new_tokens=17, stop_ids=[]))


def test_an_encoder_decoder_answers_through_an_adapter() -> None:
    from peft import LoraConfig, get_peft_model

    base = make_seq2seq()
    settings = options(stop_ids=[EOS], num_beams=2)
    plain = answer_ids(base, sources(), **settings)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_2_SEQ_LM"))
    assert answer_ids(model, sources(), **settings) == plain


def test_drawn_tokens_go_with_no_beams(model: Any, prompts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="num_beams must be 1, not 2"):
        answer_ids(model, prompts, do_sample=True, **options(), num_beams=2)
