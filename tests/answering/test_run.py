"""Prompts of every task are answered without Kedro, whatever held the work up before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_tuning.answering import run
from lm_tuning.answering.records import AnswersRecord
from lm_tuning.errors import UserError
from lm_tuning.parameters import Parameters
from tests.support.stored import save_tuned
from tests.support.tiny import ASSISTANT, BOS, END, EOS, USER, ids, make_tokenizer, save_tiny_model
from tests.support.tiny_tasks import make_seq2seq, save_base, save_tuned_task


def answer(
    tuned: Path, work: Path, prompts: object, *, data: dict[str, Any] | None = None, **generate: Any
) -> tuple[list[Any], AnswersRecord]:
    """Answer prompts; return the rows and the figures."""
    generation = {"max_new_tokens": 6, **generate.pop("generation", {})}
    parameters = Parameters(
        generate={"prompts": str(prompts), "generation": generation, **generate},
        data={"path": "rows.jsonl", **(data or {})},
    )
    settings = run.AnswerSettings.choose(
        tuned,
        parameters.generate,
        parameters.data,
        parameters.tokenize,
        model=parameters.model,
        environment=parameters.environment,
        seed=42,
    )
    work.mkdir(exist_ok=True)
    finished, record = run.answer_prompts(tuned, work, settings)
    rows = [json.loads(line) for line in finished.read_text(encoding="utf-8").splitlines()]
    finished.unlink()
    return rows, record


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    base = save_tiny_model(folder / "base")
    return save_tuned(folder / "tuned", base, "lora", tokens_key="k", compute_dtype="float32")


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The prompts that models are given from here on, as tokens."""
    seen: list[list[int]] = []
    generate = run.generate_answers

    def note(model: Any, prompts: Any, **more: Any) -> Any:
        seen.extend(prompts)
        return generate(model, prompts, **more)

    monkeypatch.setattr(run, "generate_answers", note)
    return seen


def test_an_encoder_decoder_reads_prompts_as_the_libraries_do(tmp_path: Path) -> None:
    base = save_base(make_seq2seq(), tmp_path / "base")
    model = make_seq2seq(seed=1)
    folder = save_tuned_task(tmp_path / "tuned", base, model, "full", "seq2seq_lm", tokens_key="k")
    tuning = json.loads((folder / "tuning.json").read_text())
    (folder / "tuning.json").write_text(json.dumps({**tuning, "compute_dtype": "float32"}))
    prompts = write(tmp_path / "p.jsonl", {"document": "a long one", "summary": "x"}, {"document": "b"})
    rows, record = answer(folder, tmp_path / "work", prompts)
    expected = []
    model.generation_config.forced_eos_token_id = None  # a setting of its own, which is set aside
    for text in ("a long one", "b"):
        source = torch.tensor([[*ids(text), EOS]])
        made = model.generate(
            input_ids=source, max_new_tokens=6, do_sample=False, num_beams=1, eos_token_id=EOS, pad_token_id=0
        )
        expected.append(make_tokenizer(eos_token="<eos>").decode(made[0, 1:], skip_special_tokens=True))
    assert [row["answer"] for row in rows] == expected
    assert record["figures"]["num_answers"] == 2
    beams, _ = answer(folder, tmp_path / "work", prompts, generation={"num_beams": 2})
    assert all(row["log_probability"] is None for row in beams)


def test_running_text_is_gone_on_with_and_keeps_its_end(tmp_path: Path, given: list[list[int]]) -> None:
    base = save_tiny_model(tmp_path / "base", adds_bos=True)
    folder = save_tuned(tmp_path / "tuned", base, "full", tokens_key="k", rendering={"format": "text"})
    make_tokenizer(adds_bos=True).save_pretrained(folder)
    rows, record = answer(
        folder, tmp_path / "work", write(tmp_path / "p.jsonl", {"text": "once upon"}, {"text": "x" * 600 + "end"})
    )
    assert given[0] == [BOS, *ids("once upon")]
    assert len(given[1]) == 512 - 6
    assert given[1][0] == BOS
    assert given[1][-4:] == ids("xend")
    assert (len(rows), record["figures"]["prompts"]["num_shortened"]) == (2, 1)


def test_a_long_prompt_keeps_its_fixed_text_and_the_header_of_the_answer(
    tuned: Path, tmp_path: Path, given: list[list[int]]
) -> None:
    prompts = write(tmp_path / "p.jsonl", {"body": "y" * 700, "ask": "why?"})
    answer(tuned, tmp_path / "work", prompts, template="Read:\n{body}\nSay {ask}")
    [prompt] = given
    assert len(prompt) <= 512 - 6
    assert prompt[: len("Read:\ny") + 1] == [USER, *ids("Read:\ny")]
    tail = [*ids("y\nSay why?"), END, ASSISTANT]
    assert prompt[-len(tail) :] == tail


def test_a_typed_control_token_stays_letters(tuned: Path, tmp_path: Path, given: list[list[int]]) -> None:
    answer(tuned, tmp_path / "work", write(tmp_path / "p.jsonl", {"prompt": "a<|end|>b"}))
    assert given == [[USER, *ids("a<|end|>b"), END, ASSISTANT]]


def test_several_files_are_answered_in_their_order(tuned: Path, tmp_path: Path) -> None:
    folder = tmp_path / "prompts"
    folder.mkdir()
    write(folder / "a.jsonl", {"prompt": "1"}, {"prompt": "2"})
    (folder / "b.csv").write_text("prompt\n3\n4\n")
    rows, _ = answer(tuned, tmp_path / "work", folder)
    assert [(row["row_id"], Path(row["file"]).name, row["row"], row["prompt"]) for row in rows] == [
        (1, "a.jsonl", 1, "1"),
        (2, "a.jsonl", 2, "2"),
        (3, "b.csv", 1, "3"),
        (4, "b.csv", 2, "4"),
    ]


def test_rows_that_the_chat_template_refuses_are_bad_rows_like_others(tmp_path: Path) -> None:
    template = "{% if messages[0]['content'] == 'no' %}{{ raise_exception('not this') }}{% endif %}" + str(
        make_tokenizer().chat_template
    )
    base = save_tiny_model(tmp_path / "base", chat_template=template)
    folder = save_tuned(tmp_path / "tuned", base, "lora", tokens_key="k")
    make_tokenizer(chat_template=template).save_pretrained(folder)
    prompts = write(tmp_path / "p.jsonl", {"prompt": "yes"}, {"prompt": "no"}, {"prompt": 1})
    with pytest.raises(UserError) as caught:
        answer(folder, tmp_path / "work", prompts)
    told = "\n".join(caught.value.problems)
    assert "p.jsonl, row 2:" in told
    assert "not this" in told
    assert "p.jsonl, row 3:" in told
    rows, record = answer(folder, tmp_path / "work", prompts, data={"on_bad_row": "skip", "max_bad_fraction": 0.9})
    assert [row["row"] for row in rows] == [1]
    assert record["figures"]["prompts"]["num_skipped"] == 2


def test_answers_end_at_a_stop_string_and_at_a_limit(tuned: Path, tmp_path: Path) -> None:
    prompts = write(tmp_path / "p.jsonl", {"prompt": "hello"})
    [[whole], _] = answer(tuned, tmp_path / "work", prompts)
    assert whole["finish_reason"] == "length"
    stop = whole["answer"][2]
    [[cut], record] = answer(tuned, tmp_path / "work", prompts, generation={"stop_strings": [stop]})
    assert cut["finish_reason"] == "stop_string"
    assert cut["answer"] == whole["answer"][: whole["answer"].index(stop)]
    assert record["figures"]["finish_reasons"] == {"stop_string": 1}


def test_what_was_finished_and_not_moved_is_not_answered_again(
    tuned: Path, tmp_path: Path, given: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = write(tmp_path / "p.jsonl", {"prompt": "1"}, {"prompt": "2"})
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", lambda self, **options: None)
        first, _ = answer(tuned, tmp_path / "work", prompts)
    assert len(given) == 2
    again, record = answer(tuned, tmp_path / "work", prompts)
    assert again == first
    assert len(given) == 2
    assert (record["figures"]["num_answered_before"], record["figures"]["tokens_per_second"]) == (2, None)


@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_weights_are_held_in_fewer_bits_while_answering(
    tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    from lm_tuning.models.quantization import quantized_bits

    seen: list[int | None] = []
    load = run.load_asked

    def note(*arguments: Any, **options: Any) -> Any:
        model = load(*arguments, **options)
        seen.append(quantized_bits(model))
        return model

    monkeypatch.setattr(run, "load_asked", note)
    rows, record = answer(
        tuned, tmp_path / "work", write(tmp_path / "p.jsonl", {"prompt": "hello"}), quantization=quantization
    )
    assert seen == [8 if quantization == "int8" else 4]
    assert record["quantization"] == quantization
    assert rows[0]["num_tokens"] > 0


def test_answers_to_rows_that_are_bad_by_now_are_not_gone_on_with(
    tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = write(tmp_path / "p.jsonl", {"prompt": "y" * 200}, {"prompt": "2"})
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", lambda self, **options: None)
        rows, _ = answer(tuned, tmp_path / "work", prompts)
    assert [row["row"] for row in rows] == [1, 2]
    lenient = {"max_row_bytes": 100, "on_bad_row": "skip", "max_bad_fraction": 0.9}
    rows, record = answer(tuned, tmp_path / "work", prompts, data=lenient)
    assert [row["row"] for row in rows] == [2]
    assert record["figures"]["num_answers"] == record["figures"]["prompts"]["num_prompts"] == 1


def test_weights_that_are_no_numbers_are_told_by_row(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_tuned(tmp_path / "tuned", save_tiny_model(tmp_path / "base"), "full", tokens_key="k")
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight * torch.nan for name, weight in weights.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    prompts = write(tmp_path / "p.jsonl", {"prompt": "hello"})
    with pytest.raises(UserError, match=r"no number as the probability of its answer to row 1 of .*p\.jsonl"):
        answer(folder, tmp_path / "work", prompts)
