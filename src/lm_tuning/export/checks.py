"""See before any work that a tuned model can be exported as it is asked for: its base, its tokenizer, the space."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from lm_tuning.errors import MachineFault, UserError
from lm_tuning.export.gguf_export import find_gguf_problems
from lm_tuning.export.parity import MOST_LOGIT_BYTES
from lm_tuning.export.records import ExportDtype
from lm_tuning.models.base_model import describe_base_model
from lm_tuning.models.folders import check_tokenizer_files, check_weight_files
from lm_tuning.models.loading import build_skeleton, read_config
from lm_tuning.models.record import ModelLocation, TuningRecord, location_of
from lm_tuning.models.tuned import read_label_map, read_tuning
from lm_tuning.parameters.export import ExportParameters
from lm_tuning.storage.folders import read_manifest
from lm_tuning.storage.write_failures import folder_bytes

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Headers of files, tokenizer and reports beside the weights.
_MORE_BYTES = 64 * 2**20
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True)
class ExportPlan:
    """What is exported, once everything is known to be there.

    Attributes:
        tuned_folder: the tuned model.
        tokens_folder: rows to compare on.
        tuning: how it was made.
        export: the ``export`` parameters.
        dtype: of the written weights.
        label_map: id of each class by its name; ``None`` without classes.
        num_logits: of one prediction: tokens of the base's vocabulary, or classes.
    """

    tuned_folder: Path
    tokens_folder: Path
    tuning: TuningRecord
    export: ExportParameters
    dtype: ExportDtype
    label_map: dict[str, int] | None
    num_logits: int

    @property
    def is_adapter(self) -> bool:
        """Whether the tuned model is an adapter, whatever is exported of it."""
        return self.tuning["method"] != "full"

    @property
    def merges(self) -> bool:
        """Whether an adapter is merged."""
        return self.is_adapter and self.export.format != "adapter"

    @property
    def is_exact(self) -> bool:
        """Whether the export has to give the logits of the original, but for rounding in float32."""
        # Kernels of quantized weights are chosen by whoever loads them, and are not equal.
        is_kept = self.merges or self.tuning["quantization"] is None
        return self.dtype == "float32" and is_kept and self.export.gguf.quantization == "none"


def plan_export(
    tuned_folder: Path,
    tokens_folder: Path,
    export: ExportParameters,
    *,
    base: ModelLocation,
    digest_cache: Path | None,
    target: Path,
) -> ExportPlan:
    """Check everything that can be checked without reading a weight.

    Args:
        tuned_folder: adapter or full weights with their ``tuning.json``.
        tokens_folder: a published folder of tokenized splits.
        export: the ``export`` parameters.
        base: the ``model`` parameters' location, which may name a copy of the base that was trained on.
        digest_cache: JSON file that remembers digests of unchanged files.
        target: where the export will lie.

    Raises:
        UserError: with every problem of the tuned model and its base at once; or the disk is too full.
    """
    tuning = read_tuning(tuned_folder)
    problems: list[str] = []
    if tuning["method"] == "full" and export.format == "adapter":
        problems.append(
            f"export.format = adapter needs an adapter, and {tuned_folder} was trained in full: set export.format = "
            "merged, which writes its weights."
        )
    problems += _problems_of(lambda: check_tokenizer_files(tuned_folder))
    problems += _problems_of(lambda: _check_weights(tuned_folder, tuning))
    problems += _problems_of(lambda: _check_rows(tuned_folder, tuning, tokens_folder))
    if tuning["method"] != "full":
        problems += _problems_of(lambda: _check_base(tuned_folder, tuning, base, digest_cache))
    if export.format == "gguf" and not problems:
        problems += find_gguf_problems(tuned_folder, tuning["task"], _config_of(tuned_folder, tuning), export.gguf)
    if problems:
        raise UserError(problems)
    label_map = read_label_map(tuned_folder)
    plan = ExportPlan(
        tuned_folder=tuned_folder,
        tokens_folder=tokens_folder,
        tuning=tuning,
        export=export,
        dtype=_choose_dtype(tuned_folder, tuning, export),
        label_map=label_map,
        num_logits=len(label_map) if label_map else _count_vocabulary(tuned_folder, tuning),
    )
    _check_space(plan, target)
    return plan


def source_of(plan: ExportPlan) -> ModelLocation:
    """Return where the weights come from that are exported: the tuned folder, or the base of an adapter.

    Args:
        plan: of the export.
    """
    if plan.is_adapter:
        return location_of(plan.tuning["base"])
    return ModelLocation(name_or_path=str(plan.tuned_folder.absolute()), revision=None, trust_remote_code=False)


def _problems_of(check: Any) -> list[str]:
    try:
        check()
    except UserError as error:
        return error.problems
    return []


def _check_weights(tuned_folder: Path, tuning: TuningRecord) -> None:
    if tuning["method"] == "full":
        check_weight_files(tuned_folder)
        return
    missing = [name for name in _ADAPTER_FILES if not (tuned_folder / name).is_file()]
    if missing:
        raise UserError(
            f"{tuned_folder} has no adapter: {' and '.join(missing)} missing. Train again, or copy it again."
        )


def _check_rows(tuned_folder: Path, tuning: TuningRecord, tokens_folder: Path) -> None:
    # Ids of another tokenizer mean other words, or none; rows of another division may have been learned by heart.
    key, trained_on = read_manifest(tokens_folder)["key"], tuning.get("tokens_key")
    if key != trained_on:
        raise UserError(
            f"{tuned_folder} was trained on the token set {trained_on}, but the present one is {key}, on which it "
            "cannot be compared. Set the parameters of data, split, tokenize and model back to those of that training "
            "and make its token set again with `kedro run --pipelines=split,tokenize`, or train again."
        )


def _check_base(tuned_folder: Path, tuning: TuningRecord, base: ModelLocation, digest_cache: Path | None) -> None:
    """Refuse a base that is not the one that the adapter was trained on."""
    trained = tuning["base"]
    found = describe_base_model(**location_of(trained), digest_cache=digest_cache)
    if found["digest"] != trained["digest"]:
        raise UserError(
            f"The adapter in {tuned_folder} was trained on another base: {trained['name_or_path']} has the digest "
            f"{found['digest']} now, and had {trained['digest']} in the training. Put the base's files back, or train "
            "again."
        )
    if base["name_or_path"] == trained["name_or_path"]:
        return
    other = describe_base_model(**base, digest_cache=digest_cache)
    if other["digest"] != trained["digest"]:
        raise UserError(
            f"The adapter in {tuned_folder} was trained on {trained['name_or_path']} (digest {trained['digest']}), and "
            f"model.name_or_path = {base['name_or_path']} is another model (digest {other['digest']}). Set "
            f"model.name_or_path = {trained['name_or_path']}, or set output to that of the model you mean."
        )


def _choose_dtype(tuned_folder: Path, tuning: TuningRecord, export: ExportParameters) -> ExportDtype:
    if export.dtype != "auto":
        return export.dtype
    # What is quantized is not rounded before.
    if export.format == "adapter" or export.gguf.quantization != "none":
        return "float32"
    # Full weights are trained in float32 whatever the base's files hold.
    stored = str(getattr(_config_of(tuned_folder, tuning), "dtype", None) or "float32").removeprefix("torch.")
    return cast("ExportDtype", stored) if stored in _BYTES else "float32"


def _config_of(tuned_folder: Path, tuning: TuningRecord) -> Any:
    if tuning["method"] != "full":
        return read_config(**location_of(tuning["base"]))
    return read_config(str(tuned_folder.absolute()))


def _count_vocabulary(tuned_folder: Path, tuning: TuningRecord) -> int:
    return int(_config_of(tuned_folder, tuning).get_text_config().vocab_size)


def _check_space(plan: ExportPlan, target: Path) -> None:
    """Refuse to begin what the disk cannot hold."""
    if plan.export.format == "adapter":
        wanted = folder_bytes(plan.tuned_folder)
    else:
        skeleton = build_skeleton(**source_of(plan), task=plan.tuning["task"], label_map=plan.label_map)
        # A weight that two modules share is written once.
        wanted = sum(parameter.numel() for parameter in skeleton.parameters()) * _BYTES[plan.dtype]
    if plan.export.format == "gguf":
        wanted *= 2  # the merged model, which it is written from, lies beside it until the end
    num_references = 3 if plan.merges and plan.tuning["quantization"] else 1
    wanted += _MORE_BYTES + num_references * MOST_LOGIT_BYTES // 4
    folder = next(parent for parent in target.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise MachineFault(
            f"The export takes about {wanted / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB is free in {folder}. Nothing "
            "was written, and an earlier export is kept. Free some space there, or set export.dtype = bfloat16 or "
            "export.format = adapter."
        )
