"""Load the model that is asked, and find how its answers begin and end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_tuning.errors import UserError
from lm_tuning.evaluation.settings import EvaluationSettings
from lm_tuning.generation.generate import Prompt, find_first_id, find_stop_ids, own_first_id
from lm_tuning.models.loading import load_tokenizer, read_config
from lm_tuning.models.quantization import check_quantization, choose_quantization
from lm_tuning.models.record import TuningRecord, location_of
from lm_tuning.models.tuned import load_base, load_tuned, merge_adapter, read_tuning
from lm_tuning.parameters.generation import QuantizationName
from lm_tuning.storage.digests import digest_files, digest_values


@dataclass(frozen=True)
class AskedModel:
    """A tuned model that is there, before its weights are read.

    Attributes:
        folder: where it lies.
        tuning: how it was made.
        tokenizer: its own.
        config: of the weights that answer, of transformers.
    """

    folder: Path
    tuning: TuningRecord
    tokenizer: Any
    config: Any


@dataclass(frozen=True)
class Ends:
    """How the answers of a model begin and end.

    Attributes:
        stop_ids: EOS tokens of an answer, ascending.
        first_id: token that every answer of an encoder-decoder is made to begin with; ``None`` for none.
    """

    stop_ids: list[int]
    first_id: int | None


def find_asked_model(folder: Path) -> AskedModel:
    """Read what a tuned model says of itself; its weights and those of its base are not looked at.

    Args:
        folder: the tuned model.

    Raises:
        UserError: the folder is no tuned model, it is a classifier, or the config of its base cannot be read.
    """
    tuning = read_tuning(folder)
    if tuning["task"] == "sequence_classification":
        raise UserError(
            f"{folder} is a classifier (task: sequence_classification), which names classes and writes no text. For "
            "the class of each row: kedro run --pipelines=predict"
        )
    here = str(Path(folder).absolute())
    # Before anything is read: a base that cannot be reached would end the run after all prompts were checked.
    config = read_config(here) if tuning["method"] == "full" else read_config(**location_of(tuning["base"]))
    return AskedModel(Path(folder), tuning, load_tokenizer(here), config)


def check_bits(quantization: QuantizationName, settings: EvaluationSettings) -> None:
    """Refuse to hold weights in fewer bits where that cannot be done, before anything is read.

    Args:
        quantization: ``generate.quantization``.
        settings: the device.

    Raises:
        UserError: bitsandbytes is missing, or does not run on the device.
    """
    key = "generate.quantization"
    if quantization != "none":
        check_quantization(settings.device, setting=f"{key} = {quantization}", instead=f"{key} = none")


def load_asked(
    asked: AskedModel,
    settings: EvaluationSettings,
    *,
    name: str,
    quantization: QuantizationName = "none",
    merges: bool = True,
) -> Any:
    """Load the weights that answer.

    Args:
        asked: see :func:`find_asked_model`.
        settings: device and dtypes, see ``choose_settings``.
        name: ``tuned`` or ``base``.
        quantization: bits of the weights while answering; ``none`` for those that the model was trained with.
        merges: add an adapter to the weights, which makes it fast; else it can be switched off.

    Returns:
        The model on its device, in evaluation mode.

    Raises:
        UserError: the weights, or those of the base, cannot be read.
    """
    held = choose_quantization(quantization, compute_dtype=settings.compute_dtype)
    if name == "base":
        return load_base(
            asked.tuning,
            pad_token_id=int(asked.tokenizer.pad_token_id),
            compute_dtype=settings.compute_dtype,
            quantization=held,
            **settings.loading,
        )
    model = load_tuned(asked.folder, quantization=held, **settings.loading)
    if merges:
        merge_adapter(model)
    return model


def find_ends(asked: AskedModel, model: Any, *, name: str, reference_ids: list[int]) -> Ends:
    """Find how answers end: by the tuned model's own settings, or for its base by the rows that it was tuned on.

    Args:
        asked: the tuned model.
        model: the one that answers, wrapped or not.
        name: ``tuned`` or ``base``.
        reference_ids: an answer as a training row has it, its end included.
    """
    # Models that an earlier version has tuned were stored with the settings of their base.
    has_own_ends = name == "tuned" and asked.tuning.get("stop_token_ids") is not None
    shown = [Prompt(0, [], reference_ids)]
    stop_ids = find_stop_ids(model, asked.tokenizer, [] if has_own_ends else shown)
    first_id = own_first_id(model) if has_own_ends else find_first_id(asked.tokenizer, shown, stop_ids=stop_ids)
    return Ends(stop_ids, first_id)


def digest_model(folder: Path, *, cache: Path | None) -> str:
    """Return what changes when a tuned model is another one.

    Args:
        folder: the tuned model.
        cache: see ``digest_files``.
    """
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file() and path.suffix != ".md")
    names = [path.relative_to(folder).as_posix() for path in files]
    return digest_values(dict(zip(names, digest_files(files, cache), strict=True)))
