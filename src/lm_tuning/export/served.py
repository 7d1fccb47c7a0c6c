"""Describe an export as a model that answers requests as it was evaluated: what it is asked, and what it needs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from lm_tuning.export.records import ExportRecord, ServedModel, ServingSettings
from lm_tuning.json_types import JsonObject
from lm_tuning.models.loading import load_tokenizer
from lm_tuning.models.record import QuantizationRecord, TuningRecord
from lm_tuning.models.tuned import read_label_map, read_tuning
from lm_tuning.parameters.export import ExportParameters
from lm_tuning.text.store.table import open_split

NUM_TRIED_ROWS = 8
_CHAT_EXAMPLE = "What can you do?"


def describe_served(
    folder: Path,
    record: ExportRecord,
    tuned_folder: Path,
    tokens_folder: Path,
    export: ExportParameters,
    *,
    max_new_tokens: int,
) -> ServedModel:
    """Describe the model to MLflow.

    Args:
        folder: the published export.
        record: of the export.
        tuned_folder: what was exported.
        tokens_folder: rows, which show what the training put around a text.
        export: the ``export`` parameters.
        max_new_tokens: longest answer where a request names none: that of the evaluation.
    """
    tuning = read_tuning(tuned_folder)
    settings = _settings_of(folder, record, tuning, tokens_folder, max_new_tokens)
    # Its own flavour runs a pipeline of transformers, which knows no encoder-decoders any more, loses adapters, and
    # puts around a text what the tokenizer does by itself.
    is_plain = settings["strip_token_id"] is None and settings["append_token_id"] is None
    can_pipe = not settings["is_adapter"] and record["task"] != "seq2seq_lm" and is_plain
    flavor: Literal["transformers", "python"] = "transformers" if can_pipe else "python"
    example: list[str] | JsonObject
    if flavor == "transformers" and settings["is_chat"]:
        pipeline_task = "llm/v1/chat"
        example = {"messages": [{"role": "user", "content": _CHAT_EXAMPLE}]}
    else:
        pipeline_task = "text-classification" if settings["labels"] else "text-generation"
        example = [_CHAT_EXAMPLE] if settings["is_chat"] else _first_text(folder, record["task"], tokens_folder)
    return {
        "is_wanted": True,
        "folder": str(folder),
        "flavor": flavor,
        "pipeline_task": pipeline_task,
        "settings": settings,
        "example": example,
        "requirements": _requirements(settings),
        "register_as": export.register_as,
        "alias": export.alias,
        "tags": _tags(record),
    }


def _settings_of(
    folder: Path, record: ExportRecord, tuning: TuningRecord, tokens_folder: Path, max_new_tokens: int
) -> ServingSettings:
    tokenizer = load_tokenizer(str(folder.absolute()))
    labels = read_label_map(folder) or {}
    is_adapter, task = record["format"] == "adapter", record["task"]
    held, base = tuning["quantization"], tuning["base"]
    # Rows that no template wrote have a record too, which is not about a template.
    is_chat = "template_arguments" in tuning["rendering"]
    adds, strip, append = (
        (_adds_special_tokens(tokenizer, _prompts(task, tokens_folder, takes_whole_text=True), is_chat), None, None)
        if task == "causal_lm"
        else _frame_of(tokenizer, _prompts(task, tokens_folder))
    )
    return {
        "task": task,
        "is_adapter": is_adapter,
        "base": _absolute(base["name_or_path"]) if is_adapter else None,
        "revision": base["revision"] if is_adapter else None,
        "quantization": bitsandbytes_options(held) if is_adapter and held is not None else None,
        "num_embeddings": record["num_embeddings"],
        "is_chat": is_chat,
        "adds_special_tokens": adds,
        "append_token_id": append,
        "strip_token_id": strip,
        "max_new_tokens": max_new_tokens,
        "labels": sorted(labels, key=lambda name: labels[name]),
        "trust_remote_code": base["trust_remote_code"],
    }


def bitsandbytes_options(held: QuantizationRecord, compute_dtype: str = "float32") -> JsonObject:
    """Return the keywords of a ``BitsAndBytesConfig``, with the name of a dtype, so that JSON can hold them.

    Args:
        held: how weights are quantized.
        compute_dtype: that they are multiplied in.
    """
    if held["bits"] == 8:
        return {"load_in_8bit": True}
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": held["quant_type"],
        "bnb_4bit_use_double_quant": held["double_quant"],
        "bnb_4bit_compute_dtype": compute_dtype,
    }


def _absolute(name: str) -> str:
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() else name


def _prompts(task: str, tokens_folder: Path, *, takes_whole_text: bool = False) -> list[list[int]]:
    """Return the first rows as the model is asked them: whole texts to classify, else what stands before an answer.

    Text that is learned from its first token has nothing before it, and is taken as a whole where that is wanted.
    """
    for split in ("test", "validation", "train"):
        table = open_split(tokens_folder, split)
        rows = [table[index] for index in range(min(len(table), NUM_TRIED_ROWS))]
        if task == "sequence_classification":
            prompts = [row.input_ids.tolist() for row in rows]
        else:
            prompts = [
                row.input_ids.tolist()[: None if takes_whole_text and row.spans[-1][0] <= 1 else row.spans[-1][0]]
                for row in rows
                if row.spans
            ]
        if prompts:
            return prompts
    return []


def _adds_special_tokens(tokenizer: Any, prompts: Sequence[Sequence[int]], is_chat: bool) -> bool:
    """Return whether the tokenizer has to put its special tokens around a text to make the rows' tokens of it again."""
    # A template writes all of them, as text.
    if is_chat:
        return False
    end, num_bare, num_added = tokenizer.eos_token_id, 0, 0
    for prompt in prompts:
        # Of a text that was learned to its end the end is what a request leaves open.
        ids = list(prompt[:-1] if len(prompt) > 1 and prompt[-1] == end else prompt)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        num_bare += list(tokenizer(text, add_special_tokens=False).input_ids) == ids
        num_added += list(tokenizer(text).input_ids) == ids
    return num_added > num_bare


def _frame_of(tokenizer: Any, prompts: Sequence[Sequence[int]]) -> tuple[bool, int | None, int | None]:
    """Find out what makes the tokens of classified texts, or of an encoder's sources, of a text again.

    Returns:
        Whether the tokenizer adds its special tokens, the last of these that the training did not have, and the EOS
        token that the training put where the tokenizer does not.
    """
    if not prompts or tokenizer.eos_token_id is None:
        return True, None, None
    end = int(tokenizer.eos_token_id)
    texts = [tokenizer.decode(prompt, skip_special_tokens=True) for prompt in prompts]
    made = [list(tokenizer(text).input_ids) for text in texts]
    ends = sum(bool(ids) and ids[-1] == end for ids in made)
    wanted = sum(prompt[-1] == end for prompt in prompts)
    strip = end if ends == len(made) and wanted < len(prompts) else None
    append = end if wanted == len(prompts) and ends < len(made) else None
    return True, strip, append


def _first_text(folder: Path, task: str, tokens_folder: Path) -> list[str]:
    tokenizer = load_tokenizer(str(folder.absolute()))
    prompts = _prompts(task, tokens_folder)
    # Plain text that is learned from its first token has nothing to be asked.
    text = tokenizer.decode(prompts[0], skip_special_tokens=True) if prompts else ""
    return [text or _CHAT_EXAMPLE]


def _requirements(settings: ServingSettings) -> list[str]:
    names = ["torch", "transformers", "accelerate", "safetensors"]
    names += ["peft"] if settings["is_adapter"] else []
    names += ["bitsandbytes"] if settings["quantization"] is not None else []
    # A build of torch for a machine, such as +cpu, is found on no index.
    return [f"{name}=={version(name).partition('+')[0]}" for name in names]


def _tags(record: ExportRecord) -> dict[str, str]:
    tags = {
        "lm_tuning.format": record["format"],
        "lm_tuning.dtype": record["dtype"],
        "lm_tuning.base_model": record["base_model"],
        "lm_tuning.base_digest": record["base_digest"],
        "lm_tuning.tokens_key": record["tokens_key"],
        "lm_tuning.training_run": record["mlflow_run_id"],
        "lm_tuning.mean_kl_nats": f"{record['parity']['distance']['mean_kl_nats']:.3g}",
    }
    return {name: value for name, value in tags.items() if value}
