"""Faults of rows, tokenizers and model folders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import torch

from lm_tuning.batching.step_loader import StepDataset
from lm_tuning.batching.tasks import base as tasks
from lm_tuning.text.store.table import TOKEN_SCHEMA, TokenTable
from tests.support.planted import Registry, World, chat, chats
from tests.support.task_rows import label_map, save_tiny_bart, write_task_rows
from tests.support.tiny import BOS, END, VOCABULARY, ids

ROWS = Registry()
BEYOND = len(VOCABULARY)


def classify(world: World, *, num_classes: int = 3) -> None:
    """Make the training one of a classifier."""
    write_task_rows("sequence_classification", world.paths.tokens, num_train=20)
    world.set(task="sequence_classification", label_map=label_map(num_classes))


def translate(world: World) -> None:
    """Make the training one of an encoder-decoder."""
    write_task_rows("seq2seq_lm", world.paths.tokens, num_train=20)
    folder = save_tiny_bart(world.folder / "bart")
    world.set(task="seq2seq_lm", base={**world.settings.base, "name_or_path": str(folder)})


def add_tokens(world: World) -> None:
    """Add two tokens to the tokenizer and forget the model."""
    from transformers import AutoTokenizer

    folder = world.copy_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.add_tokens(["[[ticket]]", "[[agent]]"]) == 2
    tokenizer.save_pretrained(folder)


@ROWS("pad-is-eos")
def pad_with_the_end(world: World) -> None:
    """Stand in for a tokenizer that has no other token to pad with."""
    world.patch.setattr("lm_tuning.models.loading.choose_pad_token", lambda _: "<|end|>")


@ROWS("pad-id-not-in-config")
def forget_the_pad_id(world: World) -> None:
    world.change_model(lambda model: setattr(model.config, "pad_token_id", None))


@ROWS("id-beyond-vocabulary", "added tokens in one row", before_any_row=True)
def use_an_added_token_once(world: World) -> None:
    add_tokens(world)
    row, spans = chat("hi", "yes")
    world.write_rows([*chats(19), ([*row[:2], BEYOND, *row[2:]], [(start + 1, end + 1) for start, end in spans])])


@ROWS("id-beyond-vocabulary", "added tokens in every row", before_any_row=True)
def use_an_added_token_everywhere(world: World) -> None:
    add_tokens(world)
    world.write_rows([chat("hi", "yes", start=[BEYOND + n % 2]) for n in range(20)])


@ROWS("id-beyond-vocabulary", "a classifier's text", before_any_row=True)
def use_an_added_token_in_a_text(world: World) -> None:
    classify(world)
    add_tokens(world)
    world.write_rows([([BOS, *ids("cat"), BEYOND + 1 if n == 7 else END], []) for n in range(20)], labels=[0, 1] * 10)


@ROWS("id-beyond-vocabulary", "a negative id", before_any_row=True)
def use_a_negative_id(world: World) -> None:
    world.write_rows([*chats(19), chat("hi", "yes", start=[-1])])


@ROWS("id-beyond-vocabulary", "a held-out row", before_any_row=True)
def use_an_added_token_in_a_held_out_row(world: World) -> None:
    add_tokens(world)
    world.write_rows([*chats(5), chat("hi", "yes", start=[BEYOND])], split="validation")


@ROWS("id-beyond-vocabulary", "a row that is measured on after the training", before_any_row=True)
def use_an_added_token_in_a_test_row(world: World) -> None:
    add_tokens(world)
    world.write_rows([*chats(5), chat("hi", "yes", start=[BEYOND])], split="test")


@ROWS("id-beyond-vocabulary", "a target of an encoder-decoder", before_any_row=True)
def use_a_foreign_id_in_a_target(world: World) -> None:
    translate(world)
    world.write_rows([*chats(19), ([*ids("cat"), BEYOND], [(3, 4)])])


@ROWS("class-beyond-head", "too large", before_any_row=True)
def use_a_class_too_many(world: World) -> None:
    classify(world)
    world.write_rows([([BOS, *ids("cat")], []) for _ in range(20)], labels=[*[0, 1] * 9, 2, 3])


@ROWS("class-beyond-head", "too large, with class weights", before_any_row=True)
def use_a_class_too_many_with_weights(world: World) -> None:
    use_a_class_too_many(world)
    world.set(class_weights={"cat": 2.0})


@ROWS("class-beyond-head", "negative", before_any_row=True)
def use_a_negative_class(world: World) -> None:
    classify(world)
    world.write_rows([([BOS, *ids("cat")], []) for _ in range(20)], labels=[*[0, 1] * 9, 2, -7])


@ROWS("more-tokens-than-embeddings", before_any_row=True)
def add_tokens_that_no_row_has(world: World) -> None:
    add_tokens(world)


@ROWS("fewer-tokens-than-embeddings")
def embed_far_more_tokens(world: World) -> None:
    from transformers import LlamaForCausalLM

    folder = world.copy_model()
    model = LlamaForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(2 * BEYOND)
    model.save_pretrained(folder)


def rewrite_column(world: World, name: str, change: Any) -> None:
    """Change a column of the training rows behind the writer's back."""
    path = world.paths.tokens / "train.arrow"
    [batch] = TokenTable(path).batches()
    columns = [
        change(batch.column(field.name)) if field.name == name else batch.column(field.name) for field in TOKEN_SCHEMA
    ]
    again = pa.record_batch(columns, schema=TOKEN_SCHEMA)
    content = pa.BufferOutputStream()
    with pa.ipc.new_file(content, TOKEN_SCHEMA) as writer:
        writer.write_batch(again)
    path.write_bytes(content.getvalue().to_pybytes())


@ROWS("table-inconsistent", "lengths", before_any_row=True)
def count_a_token_too_many(world: World) -> None:
    rewrite_column(
        world, "length", lambda column: pa.array(column.to_numpy() + (np.arange(len(column)) == 4)).cast("int32")
    )


@ROWS("table-inconsistent", "spans", before_any_row=True)
def point_outside_a_row(world: World) -> None:
    def stretch(column: Any) -> Any:
        spans = column.to_pylist()
        spans[3] = [spans[3][0], spans[3][1] + 50]
        return pa.array(spans, type=pa.list_(pa.int32()))

    rewrite_column(world, "spans", stretch)


@ROWS("row-without-tokens", "a chat", before_any_row=True)
def leave_a_row_empty(world: World) -> None:
    world.write_rows([*chats(19), ([], [])])


@ROWS("row-without-tokens", "a classifier's text", before_any_row=True)
def leave_a_text_empty(world: World) -> None:
    classify(world)
    world.write_rows([([BOS, *ids("cat")] if n else [], []) for n in range(20)], labels=[0, 1] * 10)


@ROWS("source-left-out")
def weigh_a_source_with_nothing(world: World) -> None:
    from tests.training.conftest import write_rows

    write_rows(world.paths.tokens, "train", 24, num_sources=3)
    world.set(sources=[{"path": name, "weight": weight} for name, weight in (("a", 1.5), ("b", 1.0), ("c", 0.05))])


@ROWS("bos-doubled")
def begin_twice(world: World) -> None:
    world.write_rows(chats(20, start=[BOS, BOS]))


@ROWS("end-not-taught")
def leave_ends_out(world: World) -> None:
    world.write_rows(chats(20, ends=False))


@ROWS("rows-teach-nothing", "20 percent masked", severity="stop", before_any_row=True)
def mask_a_fifth(world: World) -> None:
    world.write_rows([*chats(16), *chats(4, is_masked=True)])


@ROWS("rows-teach-nothing", "5 percent masked", severity="warn")
def mask_a_twentieth(world: World) -> None:
    world.write_rows([*chats(19), *chats(1, is_masked=True)])
    world.set(effective_batch_rows=20, max_steps=2)


@ROWS("rows-teach-nothing", "texts without a class", severity="stop", before_any_row=True)
def forget_classes(world: World) -> None:
    classify(world)
    world.write_rows([([BOS, *ids("cat")], []) for _ in range(20)], labels=[*[0, 1] * 9, -1, -1])


@ROWS("rows-teach-nothing", "sources without a target", severity="stop", before_any_row=True)
def forget_targets(world: World) -> None:
    translate(world)
    world.write_rows([*chats(16), *chats(4, is_masked=True)])


@ROWS("step-teaches-nothing", before_any_row=True, alone=False)
def mask_everything(world: World) -> None:
    world.write_rows(chats(20, is_masked=True))


@ROWS("rows-longer-than-positions")
def have_few_positions(world: World) -> None:
    world.change_config(max_position_embeddings=12)


@ROWS("mask-not-padding")
def show_the_padding(world: World) -> None:
    from lm_tuning.batching.tasks.seq2seq import SequenceToSequence

    translate(world)
    sound = SequenceToSequence.lay_out

    def lay_out(task: Any, *arguments: Any, **options: Any) -> Any:
        batch = sound(task, *arguments, **options)
        assert batch.attention_mask is not None
        batch.attention_mask = torch.ones_like(batch.attention_mask)
        return batch

    world.patch.setattr(SequenceToSequence, "lay_out", lay_out)


@ROWS("padding-above-plan", "no grouping by length")
def group_rows_as_they_come(world: World) -> None:
    def cut(rows: Any, lengths: Any, *, budget_tokens: int, batching: str) -> list[list[int]]:
        groups: list[list[int]] = [[]]
        for row in map(int, rows):
            if len(groups[-1]) == 5:
                groups.append([])
            groups[-1].append(row)
        return groups

    world.write_rows([chat("hi", "a" * (2 if n % 2 else 90)) for n in range(40)])
    world.patch.setattr(tasks, "split_rows", cut)
    world.set(batching="padded", effective_batch_rows=20, max_steps=2, micro_batch_tokens=512)


@ROWS("padding-above-plan", "a fixed length")
def pad_to_a_fixed_length(world: World) -> None:
    sound = StepDataset.__getitem__

    def widen(steps: StepDataset, step: int) -> Any:
        batch = sound(steps, step)
        for micro in batch.micro_batches:
            micro.input_ids = torch.nn.functional.pad(micro.input_ids, (0, 200 - micro.input_ids.shape[1]))
        return batch

    world.patch.setattr(StepDataset, "__getitem__", widen)
    world.set(batching="padded", micro_batch_tokens=512)
