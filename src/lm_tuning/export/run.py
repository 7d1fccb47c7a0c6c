"""Export a tuned model: write it aside, compare it in a process of its own, and only then hand it over."""

from __future__ import annotations

import gc
import json
import logging
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lm_tuning.export.card import CardSources, write_export_card
from lm_tuning.export.checks import ExportPlan, source_of
from lm_tuning.export.gguf_export import GGUF_NAME, export_gguf
from lm_tuning.export.merge import merge_layers, write_weights
from lm_tuning.export.parity import (
    HeldOutRows,
    Reference,
    choose_rows,
    describe_sums,
    judge,
    measure_distance,
    require_bounds,
    run_check,
    write_reference,
)
from lm_tuning.export.plain_check import BaseOfAdapter, Job
from lm_tuning.export.records import DistanceRecord, ExportRecord, MergeBase, MergeRecord, ParityRecord
from lm_tuning.export.served import bitsandbytes_options
from lm_tuning.json_types import JsonObject
from lm_tuning.models.folders import is_local
from lm_tuning.models.generation_settings import GENERATION_NAME, complete_adapter_config
from lm_tuning.models.loading import load_model, load_tokenizer, read_config
from lm_tuning.models.record import LoadingOptions, location_of
from lm_tuning.models.structure import AUTO_CLASSES
from lm_tuning.models.tuned import LABELS_NAME, attach_adapter, load_base, load_tuned
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.storage.atomic import sync_folder
from lm_tuning.storage.write_failures import close_files_of, explain_full_disk, folder_bytes

logger = logging.getLogger(__name__)

RECORD_NAME = "export.json"
STAGING_NAME = "writing"
_WORDS = {"full_precision": "the full-precision base", "dequantized": "the dequantized base"}


@dataclass(frozen=True)
class Export:
    """What was exported.

    Attributes:
        folder: the finished folder, still beside where it belongs.
        record: as ``export.json`` has it.
    """

    folder: Path
    record: ExportRecord


@dataclass
class _Work:
    """What the parts of an export share."""

    plan: ExportPlan
    device: str
    folder: Path
    rows: HeldOutRows
    on_progress: OnProgress

    def reference_of(self, load: Callable[[], Any], name: str, what: str) -> Reference:
        """Write the logits of a model, with a bar; it is loaded here, so that nothing holds it afterwards."""
        done, total = 0, len(self.rows.rows)

        def count() -> None:
            nonlocal done
            done += 1
            self.on_progress(what, done, total, "rows")

        self.on_progress(what, 0, total, "rows")
        reference = write_reference(
            load(),
            self.rows,
            self.folder / f"{name}.logits",
            task=self.plan.tuning["task"],
            device=self.device,
            max_new_tokens=self.plan.export.parity.max_new_tokens,
            on_row=count,
        )
        free_memory()
        return reference


def export_model(
    plan: ExportPlan,
    work_folder: Path,
    *,
    device: str,
    card: CardSources,
    on_progress: OnProgress = ignore_progress,
) -> Export:
    """Write the export and prove it.

    Args:
        plan: what :func:`lm_tuning.export.checks.plan_export` has found to be possible.
        work_folder: on the file system of the export; what an earlier run left there is removed.
        device: where models are run to compare them; merging happens on the CPU.
        card: what the model card is written from, beside the plan.
        on_progress: told the rows done.

    Raises:
        UserError: the export misses a bound or cannot be loaded; nothing of it is left.
        MachineFault: the disk is full, or the process that compares was killed.
    """
    # The output is locked, so nobody else is at work here.
    shutil.rmtree(work_folder, ignore_errors=True)
    staging = work_folder / STAGING_NAME
    with explain_full_disk(staging, what="the export"):
        staging.mkdir(parents=True)
        try:
            with tempfile.TemporaryDirectory(dir=work_folder, prefix="compared-") as compared:
                work = _begin(plan, device, Path(compared), on_progress)
                record = _export(work, staging)
            write_export_card(staging, record, plan, card)
            (staging / RECORD_NAME).write_text(
                json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
            )
            sync_folder(staging)
        except BaseException as error:
            close_files_of(error)
            shutil.rmtree(work_folder, ignore_errors=True)
            raise
    return Export(staging, record)


def _begin(plan: ExportPlan, device: str, folder: Path, on_progress: OnProgress) -> _Work:
    config = read_config(**source_of(plan))
    rows = choose_rows(
        plan.tokens_folder, plan.export.parity, config=config, task=plan.tuning["task"], num_logits=plan.num_logits
    )
    return _Work(plan, device, folder, rows, on_progress)


def _export(work: _Work, staging: Path) -> ExportRecord:
    plan, merge, notes = work.plan, None, []
    is_gguf = plan.export.format == "gguf"
    written = work.folder / "merged" if is_gguf else staging
    if plan.merges:
        reference, merge = _reference_of_merge(work)
        words = f"{_WORDS[merge['base']]} with the adapter, in float32"
        _write_merged(work, written, merge)
        if merge["is_untied"]:
            notes.append(
                "The base shares one matrix between head and embedding, and the adapter changes one of the two: they "
                "are two matrices here (tie_word_embeddings = false)."
            )
    else:
        words = "the tuned model in float32"
        reference = work.reference_of(lambda: _load_tuned(work), "tuned", "Logits of the tuned model")
        if plan.export.format == "adapter":
            _copy_adapter(plan, staging)
        else:
            _write_full(work, written)
    _write_beside(plan, written)
    if is_gguf:
        _write_beside(plan, staging)
        parity, gguf, more = export_gguf(
            written,
            staging / GGUF_NAME,
            plan.export,
            # A folder with a config may bring a tokenizer back as another class, with another way to split.
            tokenizer=load_tokenizer(str(staging.absolute())),
            dtype=plan.dtype,
            name=Path(plan.tuning["base"]["name_or_path"]).name,
            rows=work.rows,
            reference=reference,
            words=words,
            work=work.folder,
            compare_merged=lambda: _compare(work, written, reference, words),
            on_progress=work.on_progress,
        )
        notes += more
    else:
        parity = _compare(work, staging, reference, words)
    require_bounds(parity)
    base = plan.tuning["base"]
    record: ExportRecord = {
        "format": plan.export.format,
        "task": plan.tuning["task"],
        "method": plan.tuning["method"],
        "dtype": plan.dtype,
        "num_bytes": folder_bytes(staging),
        # Where a folder lies is nobody's business but the user's: the file goes wherever the export goes.
        "base_model": Path(base["name_or_path"]).name if is_local(base["name_or_path"]) else base["name_or_path"],
        "base_digest": base["digest"],
        "tokens_key": plan.tuning.get("tokens_key"),
        "mlflow_run_id": plan.tuning.get("mlflow_run_id"),
        "merge": merge,
        "num_embeddings": reference.num_embeddings,
        "parity": parity,
        "notes": notes,
    }
    if is_gguf:
        record["gguf"] = gguf
    return record


def _reference_of_merge(work: _Work) -> tuple[Reference, MergeRecord]:
    """Run the base with the adapter beside it; of two possible bases keep the closer one to the model as trained."""
    plan = work.plan
    if plan.tuning["quantization"] is None:
        reference = work.reference_of(lambda: _load_tuned(work), "full_precision", "Logits of base and adapter")
        return reference, {"base": "full_precision", "num_merged_layers": 0, "is_untied": False}
    dtype = str(plan.tuning.get("compute_dtype", "float32"))
    trained = work.reference_of(
        lambda: load_tuned(plan.tuned_folder, dtype=dtype, device=work.device),
        "trained",
        "Logits of the model as trained",
    )
    choice = plan.export.merge_base
    bases: tuple[MergeBase, ...] = ("full_precision", "dequantized") if choice == "auto" else (choice,)
    references: dict[MergeBase, Reference] = {}
    distances: dict[MergeBase, DistanceRecord] = {}
    for base in bases:
        load = partial(_attach, plan, base, dtype="float32", device=work.device)
        references[base] = work.reference_of(load, base, f"Logits of {_WORDS[base]} with the adapter")
        distances[base] = measure_distance(trained, references[base], work.rows)
    closer = min(bases, key=lambda base: distances[base]["mean_kl_nats"])
    told = ", ".join(f"{_WORDS[base]} {each['mean_kl_nats']:.3g} nats" for base, each in distances.items())
    logger.info("Mean divergence from the model as trained: %s. Merged into %s.", told, _WORDS[closer])
    merge: MergeRecord = {
        "base": closer,
        "num_merged_layers": 0,
        "is_untied": False,
        "distance_to_trained": distances,
    }
    return references[closer], merge


def _attach(plan: ExportPlan, base: MergeBase, *, dtype: str, device: str) -> Any:
    """Load a base without quantized weights and put the adapter on it."""
    pad_token_id = int(load_tokenizer(str(plan.tuned_folder.absolute())).pad_token_id)
    if base == "full_precision":
        model: Any = load_model(
            **location_of(plan.tuning["base"]),
            task=plan.tuning["task"],
            label_map=plan.label_map,
            pad_token_id=pad_token_id,
            dtype=dtype,
            device=device,
        )
    else:
        # The weights that the training saw: those that quantizing in its own dtype left of the full ones.
        trained = str(plan.tuning.get("compute_dtype", "float32"))
        options = LoadingOptions(dtype=trained, attention="auto", device=device)
        quantized: Any = load_base(
            plan.tuning, label_map=plan.label_map, pad_token_id=pad_token_id, compute_dtype=trained, **options
        )
        model = quantized.dequantize()
        if dtype == "float32":
            model = model.float()
    return attach_adapter(model, plan.tuned_folder)


def _load_tuned(work: _Work) -> Any:
    """Load the tuned model in float32; of a quantized base what is not quantized."""
    return load_tuned(work.plan.tuned_folder, dtype="float32", device=work.device)


def free_memory() -> None:
    """Give the memory of a model back before the next one is loaded."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _write_merged(work: _Work, staging: Path, merge: MergeRecord) -> None:
    """Merge on the CPU, in the dtype of the base's files, and write."""
    plan = work.plan
    work.on_progress("Merging", 0, 1, "model")
    stored = str(getattr(read_config(**location_of(plan.tuning["base"])), "dtype", None)).removeprefix("torch.")
    # What is rounded before the merge would be rounded twice.
    held = stored if stored in ("bfloat16", "float16") and plan.dtype != "float32" else "float32"
    merged = merge_layers(_attach(plan, merge["base"], dtype=held, device="cpu"), plan.dtype)
    merge["num_merged_layers"], merge["is_untied"] = merged.num_layers, merged.is_untied
    write_weights(merged.model, staging, plan.dtype)
    del merged
    gc.collect()
    work.on_progress("Merging", 1, 1, "model")


def _write_full(work: _Work, staging: Path) -> None:
    """Write fully trained weights in the dtype."""
    plan = work.plan
    folder = str(plan.tuned_folder.absolute())
    stored = str(getattr(read_config(folder), "dtype", None)).removeprefix("torch.")
    held = stored if stored in ("bfloat16", "float16") and plan.dtype != "float32" else "float32"
    write_weights(load_model(folder, task=plan.tuning["task"], dtype=held), staging, plan.dtype)
    gc.collect()


def _copy_adapter(plan: ExportPlan, staging: Path) -> None:
    """Copy an adapter, its weights in the dtype."""
    import torch
    from safetensors.torch import load_file, save_file

    for name in ("adapter_config.json", GENERATION_NAME):
        if (plan.tuned_folder / name).is_file():
            shutil.copyfile(plan.tuned_folder / name, staging / name)
    complete_adapter_config(staging, plan.tuning["base"])
    target = getattr(torch, plan.dtype)
    tensors = load_file(plan.tuned_folder / "adapter_model.safetensors")
    cast = {name: tensor.to(target) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    save_file(cast, staging / "adapter_model.safetensors", metadata={"format": "pt"})


def _write_beside(plan: ExportPlan, staging: Path) -> None:
    """Write tokenizer, settings of generation and label map."""
    tokenizer = load_tokenizer(str(plan.tuned_folder.absolute()))
    arguments = plan.tuning["rendering"].get("template_arguments") or {}
    if isinstance(tokenizer.chat_template, str) and arguments:
        tokenizer.chat_template = fix_template_arguments(tokenizer.chat_template, arguments)
    tokenizer.save_pretrained(staging)
    for name in (GENERATION_NAME, LABELS_NAME):
        if (plan.tuned_folder / name).is_file():
            shutil.copyfile(plan.tuned_folder / name, staging / name)


def fix_template_arguments(template: str, arguments: JsonObject) -> str:
    """Give a chat template the arguments of the training as its own, since servers call it without any.

    Args:
        template: in Jinja.
        arguments: by name; a caller's own value still wins.
    """
    # Names that a condition sets at the top level hold for the rest of a template, and literals are those of Python.
    own = (f"{{% if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}"
           for name, value in arguments.items())  # fmt: skip
    return "".join(own) + template


def _compare(work: _Work, staging: Path, reference: Reference, words: str) -> ParityRecord:
    """Let a process of its own load the export and compare it."""
    plan, tuning = work.plan, work.plan.tuning
    adapter: BaseOfAdapter | None = None
    if plan.export.format == "adapter":
        held = tuning["quantization"]
        adapter = {
            "name_or_path": str(source_of(plan)["name_or_path"]),
            "revision": tuning["base"]["revision"],
            "num_labels": len(plan.label_map) if plan.label_map else None,
            "num_embeddings": reference.num_embeddings,
            "quantization": None if held is None else bitsandbytes_options(held),
        }
    job: Job = {
        "folder": str(staging.absolute()),
        "auto_class": AUTO_CLASSES[tuning["task"]],
        "device": work.device,
        "trust_remote_code": bool(tuning["base"]["trust_remote_code"]),
        "is_classifier": tuning["task"] == "sequence_classification",
        "pad_token_id": int(load_tokenizer(str(staging)).pad_token_id),
        "adapter": adapter,
        "rows": work.rows.rows,
        "logits": str(reference.path.absolute()),
        "num_logits": reference.num_logits,
        "answers": reference.answers,
        "max_new_tokens": plan.export.parity.max_new_tokens,
    }
    work.on_progress("Comparing the export in a process of its own", 0, 1, "export")
    found = run_check(job, work.folder)
    work.on_progress("Comparing the export in a process of its own", 1, 1, "export")
    distance = describe_sums(found["sums"])
    return {
        "split": work.rows.split,
        "num_rows": len(work.rows.rows),
        "reference": words,
        "distance": distance,
        "distance_in_dtype": describe_sums(found["sums_in_dtype"]) if found["sums_in_dtype"] else None,
        "bounds": judge(distance, plan.export.parity, is_exact=plan.is_exact),
        "num_answers": len(reference.answers),
        "num_equal_answers": found["num_equal_answers"],
        "dtype": found["dtype"],
        "device": work.device,
        "seconds": found["seconds"],
        "versions": found["versions"],
    }
