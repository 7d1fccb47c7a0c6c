"""Tiny random classifiers and encoder-decoders, and rows and tuned folders for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_tuning.text.store.table import TokenTable, TokenTableWriter
from tests.support.tiny import BOS, EOS, PAD, VOCABULARY, bart_config, ids, make_tokenizer

LABEL_MAP = {"card": 0, "cash": 1, "loan": 2, "none_of_these": 3}


def make_classifier(*, seed: int = 0, num_labels: int = len(LABEL_MAP), spread: float = 0.3) -> Any:
    """Build a random Llama with a classification head; a larger spread makes it surer of itself."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=PAD,
        num_labels=num_labels,
    )
    return _spread(LlamaForSequenceClassification, config, seed, spread, torch)


def make_seq2seq(*, seed: int = 0, spread: float = 0.3, max_positions: int = 64) -> Any:
    """Build a random BART; a larger spread makes its answers vary."""
    import torch
    from transformers import BartForConditionalGeneration

    config = bart_config(max_position_embeddings=max_positions)
    return _spread(BartForConditionalGeneration, config, seed, spread, torch)


def _spread(kind: Any, config: Any, seed: int, spread: float, torch: Any) -> Any:
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(spread * torch.randn(parameter.shape))
    torch.random.set_rng_state(state)
    return model


def write_labelled(rows: Sequence[tuple[Sequence[int], int]], path: Path) -> TokenTable:
    """Write rows of (ids, class) as a token file; row ids count from 100."""
    with TokenTableWriter(path) as writer:
        for index, (input_ids, label) in enumerate(rows):
            writer.append(100 + index, list(input_ids), [], label=label)
    return TokenTable(path)


def write_pairs(rows: Sequence[tuple[str, str]], path: Path, *, has_bos: bool = False) -> TokenTable:
    """Write rows of (source, target) as an encoder-decoder reads them; row ids count from 100."""
    start = [BOS] if has_bos else []
    with TokenTableWriter(path) as writer:
        for index, (source, target) in enumerate(rows):
            given, wanted = [*start, *ids(source), EOS], [*start, *ids(target), EOS]
            writer.append(100 + index, [*given, *wanted], [(len(given), len(given) + len(wanted))])
    return TokenTable(path)


def save_base(model: Any, folder: Path) -> Path:
    """Store a model with the tokenizer whose end is the model's."""
    model.save_pretrained(folder)
    make_tokenizer(eos_token="<eos>").save_pretrained(folder)
    return folder


def save_tuned_task(
    folder: Path, base: Path, model: Any, method: str, task: str, *, tokens_key: str, label_map: Any = None
) -> Path:
    """Store a tuned model as training does: the model itself, or it with an adapter of random weights."""
    import torch

    from lm_tuning.models.base_model import describe_base_model

    if method == "lora":
        from peft import LoraConfig, get_peft_model

        kinds = {"sequence_classification": "SEQ_CLS", "seq2seq_lm": "SEQ_2_SEQ_LM"}
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type=kinds[task]))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    if label_map is not None:
        model.config.id2label = {position: name for name, position in label_map.items()}
        model.config.label2id = dict(label_map)
    model.save_pretrained(folder)
    make_tokenizer(eos_token="<eos>").save_pretrained(folder)
    tuning = {
        "method": method,
        "task": task,
        "quantization": None,
        "base": describe_base_model(str(base)),
        "tokens_key": tokens_key,
        "finished_step": 3,
        "tokens_per_second": 1234.5,
    }
    (folder / "tuning.json").write_text(json.dumps(tuning))
    if label_map is not None:
        (folder / "label_map.json").write_text(json.dumps(label_map))
    return folder
