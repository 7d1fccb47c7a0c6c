"""Token folders and tuned models as the pipelines before evaluation store them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_tuning.evaluation.settings import EvaluationSettings
from lm_tuning.parameters import EvaluateParameters
from lm_tuning.text.store.table import TokenTable, TokenTableWriter
from tests.support.answers import take_generation
from tests.support.tiny import ASSISTANT, END, USER, ids, make_model, make_tokenizer

Row = tuple[Sequence[int], Sequence[tuple[int, int]]]


def write_rows(rows: Sequence[Row], path: Path) -> TokenTable:
    path.parent.mkdir(parents=True, exist_ok=True)
    with TokenTableWriter(path) as writer:
        for index, (input_ids, spans) in enumerate(rows):
            writer.append(100 + index, list(input_ids), list(spans))
    return TokenTable(path)


def chat_row(question: str, answer: str) -> Row:
    """Tokenize one turn; the answer and its end are supervised."""
    prompt = [USER, *ids(question), END, ASSISTANT]
    reply = [*ids(answer), END]
    return [*prompt, *reply], [(len(prompt), len(prompt) + len(reply))]


def publish_tokens(root: Path, key: str, **splits: Sequence[Row]) -> Path:
    """Store token splits as the tokenize pipeline does."""
    from lm_tuning.storage.folders import FolderStore

    store = FolderStore(root)
    staged = store.stage(key)
    for split in ("train", "validation", "test"):
        write_rows(splits.get(split, []), staged.path / f"{split}.arrow")
    return store.publish(staged)


def save_tuned(folder: Path, base: Path, method: str, *, tokens_key: str, **facts: Any) -> Path:
    """Store a model whose weights differ from the base's, as training does."""
    import torch

    from lm_tuning.models.base_model import describe_base_model

    model: Any = make_model()
    generator = torch.Generator().manual_seed(1)
    if method == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if method == "full" or "lora_" in name:
                change = 0.2 * torch.randn(parameter.shape, generator=generator)
                parameter.copy_(change if method == "lora" else parameter + change)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    tuning = {
        "method": method,
        "base": describe_base_model(str(base)),
        "tokens_key": tokens_key,
        "finished_step": 3,
        "tokens_per_second": 1234.5,
        **facts,
    }
    (folder / "tuning.json").write_text(json.dumps(tuning))
    return folder


def evaluation_settings(**changes: Any) -> EvaluationSettings:
    """Return settings for a CPU in full precision; those of the ``evaluate`` parameters go into their group."""
    settings = {
        "seed": 42,
        "device": "cpu",
        "weights_dtype": "float32",
        "compute_dtype": "float32",
        "max_loss_rows": None,
        **changes,
    }
    settings = take_generation(settings)
    evaluate = {name: settings.pop(name) for name in EvaluateParameters.model_fields if name in settings}
    return EvaluationSettings(**settings, evaluate=EvaluateParameters(**evaluate))
