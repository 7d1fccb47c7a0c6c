"""Rows as the split pipeline stores them, and the supervised part of tokens as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from lm_tuning.data.format.examples import FIELDS
from lm_tuning.data.store import ExampleWriter, example_schema
from lm_tuning.parameters.data import TokenizeParameters
from lm_tuning.text.records import TokenRow
from lm_tuning.text.store.table import open_split
from lm_tuning.text.tokenize import write_tokens
from lm_tuning.text.tokenizers.causal_lm import RowTokenizer
from lm_tuning.text.tokenizers.counts import SplitCounts
from tests.support.tiny import SPECIALS

Tokenize = Callable[..., tuple[dict[str, Any], list[TokenRow]]]


def store_examples(
    folder: Path,
    format: str,
    train: Sequence[Any],
    *,
    label_map: dict[str, int] | None = None,
    **others: Sequence[Any],
) -> Path:
    """Write splits as if of one file; row ids count from 1. Messages may be given as lists."""
    folder.mkdir(parents=True, exist_ok=True)
    row_id = 0
    for split in ("train", "validation", "test"):
        with ExampleWriter(folder / f"{split}.arrow", format) as writer:
            for row in train if split == "train" else others.get(split, ()):
                row_id += 1
                values = row if isinstance(row, tuple) else (row,)
                if format == "messages":
                    values = (json.dumps(values[0]), json.dumps(values[1]) if values[1:] else None)
                writer.append(row_id, values)
    summary = {
        "files": [
            {
                "path": "rows.jsonl",
                "split": "train",
                "source": 0,
                "first_row_id": 1,
                "rows_read": row_id,
                "rows_skipped": {},
            }
        ],
        "sources": [{"path": "rows.jsonl", "weight": 1.0, "num_rows": len(train)}],
        "label_map": label_map,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture
def tokenize(tmp_path: Path) -> Tokenize:
    """Tokenize rows with a tokenizer; return the summary and the training rows."""
    runs = 0

    def run(tokenizer: Any, format: str, train: Sequence[Any], **options: Any) -> tuple[dict[str, Any], list[TokenRow]]:
        nonlocal runs
        runs += 1
        splits = {name: options.pop(name) for name in ("validation", "test", "label_map") if name in options}
        examples = store_examples(tmp_path / f"examples{runs}", format, train, **splits)
        tokens = tmp_path / f"tokens{runs}"
        tokens.mkdir()
        others = {
            name: options.pop(name)
            for name in ("task", "on_bad_row", "max_bad_fraction", "on_progress")
            if name in options
        }
        settings = TokenizeParameters(**{"max_length_tokens": 100, **options})
        summary = write_tokens(tokens, examples, tokenizer, settings, **others)
        return summary, list(open_split(tokens, "train"))

    return run


def supervised(row: TokenRow) -> list[int]:
    """Return the ids that the loss is taken of."""
    return [int(token) for start, end in row.spans for token in row.input_ids[start:end]]


def add_around(tokenizer: Any, pattern: str) -> Any:
    """Let a tokenizer put special tokens around texts, such as ``<bos> $A <eos>``."""
    from tokenizers import processors

    used = [(token, SPECIALS.index(token)) for token in pattern.split() if token in SPECIALS]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=pattern, special_tokens=used)
    return tokenizer


def make_kobart_tokenizer() -> Any:
    """Build a tokenizer as KoBART has it: a space becomes a letter, and nothing is put around a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=200,
        special_tokens=[AddedToken(name, special=True) for name in ("<s>", "</s>", "<pad>", "<unk>", "<mask>")],
        show_progress=False,
    )
    core.train_from_iterator(
        ["한국어 요약 문장", "요약 요약 문장 문장", "the short summary of a text </s>"] * 5, trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def make_bart_tokenizer() -> Any:
    """Build a tokenizer as BART has it: byte-level, with ``<s>`` before and ``</s>`` behind a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[AddedToken(name, special=True) for name in ("<s>", "<pad>", "</s>", "<unk>", "<mask>")],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["the short summary of a long text"] * 5, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def make_byte_tokenizer(**options: Any) -> Any:
    """Build a byte-level tokenizer with the special tokens of the tiny one, as Llama 3, Qwen and SmolLM2 have them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["answer: yes no yes  answer", "assistant\n\n\nyes"] * 20, trainer)
    for name, value in options.pop("parts", {}).items():
        setattr(core, name, value)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, **{"bos_token": "<bos>", "eos_token": "<|end|>", "pad_token": "<pad>"}
    )
    tokenizer.chat_template = options.get("chat_template")
    return tokenizer


def tokenize_rows(
    tokenizer: Any, format: str, rows: Sequence[Any], **options: Any
) -> tuple[list[TokenRow], SplitCounts]:
    """Tokenize rows in memory, as one chunk."""
    fields = FIELDS[format]
    columns = {name: [row[position] for row in rows] for position, name in enumerate(fields)}
    batch = pa.record_batch(
        [
            pa.array(range(1, len(rows) + 1), pa.int64()),
            *(pa.array(columns[name], pa.string()) for name in fields),
            pa.array([0] * len(rows), pa.int16()),
        ],
        schema=example_schema(format),
    )
    settings = TokenizeParameters(**{"max_length_tokens": 4096, **options})
    counts = SplitCounts()
    with RowTokenizer(tokenizer, settings, format) as row_tokenizer:
        rendered = row_tokenizer.render(batch, counts)
        made = row_tokenizer.finish(rendered, row_tokenizer.encode(rendered), counts)
    found = []
    for position in range(len(made)):
        spans = made.spans[made.span_offsets[position] : made.span_offsets[position + 1]].tolist()
        ids = made.ids[made.id_offsets[position] : made.id_offsets[position + 1]]
        found.append(TokenRow(int(made.row_ids[position]), ids, list(zip(spans[::2], spans[1::2], strict=True))))
    return found, counts
