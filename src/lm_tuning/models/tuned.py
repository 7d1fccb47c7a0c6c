"""Load what a training stored: a model with its adapter, or a model whose own weights were trained."""

from __future__ import annotations

import json
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from lm_tuning.errors import UserError
from lm_tuning.models.generation_settings import take_stored_settings
from lm_tuning.models.loading import load_model, load_tokenizer
from lm_tuning.models.quantization import Quantization
from lm_tuning.models.record import LoadingOptions, TuningRecord, location_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

FACTS_NAME = "tuning.json"
LABELS_NAME = "label_map.json"
METHODS = ("lora", "qlora", "full")

_EMBEDDINGS = ("embed_tokens.weight", "embed_in.weight", "wte.weight", "shared.weight", "word_embeddings.weight")


def read_tuning(folder: Path) -> TuningRecord:
    """Read how a tuned model was made, with what earlier versions did not note filled in.

    Args:
        folder: a tuned model.

    Raises:
        UserError: the folder is not a tuned model.
    """
    try:
        tuning: TuningRecord = json.loads((Path(folder) / FACTS_NAME).read_text(encoding="utf-8"))
        method = tuning["method"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder} is not a tuned model: it has no readable {FACTS_NAME}.") from error
    if method not in METHODS:
        raise UserError(f"{folder} was tuned by the method {method!r}; this version knows {', '.join(METHODS)}.")
    # What models of earlier versions do not say.
    tuning.setdefault("task", "causal_lm")
    tuning.setdefault("quantization", None)
    tuning.setdefault("rendering", {})
    if "base" in tuning:
        tuning["base"].setdefault("revision", None)
        tuning["base"].setdefault("trust_remote_code", False)
    return tuning


def read_label_map(folder: Path) -> dict[str, int] | None:
    """Return the classes that a tuned model was trained for, None when it has none."""
    path = Path(folder) / LABELS_NAME
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def load_tuned(
    folder: Path,
    *,
    dtype: str = "float32",
    attention: str = "auto",
    device: str = "cpu",
    base: PreTrainedModel | None = None,
    quantization: Quantization | None = None,
) -> Any:
    """Load a tuned model for evaluation, for the task that it was trained for.

    Args:
        folder: a tuned model.
        dtype: type of the weights, and of the arithmetic on quantized ones: ``float32``, ``bfloat16`` or ``float16``.
        attention: ``auto``, ``sdpa``, ``eager`` or ``flash_attention_2``.
        device: where the weights go.
        base: the base model when it is loaded already, for an adapter; it gets wrapped in place.
        quantization: how the weights are held in place of as they were trained: all that were trained by ``full``, and
            the base's beside an adapter, which stays as it is.

    Returns:
        A PEFT model (``lora``, ``qlora``: ``with model.disable_adapter():`` is the base, quantized as in training) or
        a plain one (``full``).

    Raises:
        UserError: the folder is not a tuned model, or its base cannot be loaded.
    """
    tuning = read_tuning(folder)
    here = str(Path(folder).absolute())
    options = LoadingOptions(dtype=dtype, attention=attention, device=device)
    if tuning["method"] == "full":
        return load_model(here, task=tuning["task"], quantization=quantization, **options)
    if base is None:
        base = load_base(
            tuning,
            # The head's size is that of the classes; its weights come with the adapter.
            label_map=read_label_map(folder) if tuning["task"] == "sequence_classification" else None,
            pad_token_id=int(load_tokenizer(here).pad_token_id),
            compute_dtype=dtype,
            quantization=quantization,
            **options,
        )
    return attach_adapter(base, folder)


def load_base(
    tuning: TuningRecord,
    *,
    pad_token_id: int,
    compute_dtype: str,
    label_map: dict[str, int] | None = None,
    quantization: Quantization | None = None,
    **options: Unpack[LoadingOptions],
) -> PreTrainedModel:
    """Load the base of a tuned model as its training saw it: quantized, if it was, unless it is told otherwise.

    Args:
        tuning: how the tuned model was made.
        pad_token_id: id to pad with.
        compute_dtype: dtype of the arithmetic on quantized weights.
        label_map: id of each class by its name, for classification.
        quantization: how the weights are held in place of as its training held them.
        **options: how the weights are held.

    Raises:
        UserError: the base cannot be loaded.
    """
    held = tuning["quantization"]
    if quantization is None and held is not None:
        quantization = Quantization(**held, compute_dtype=compute_dtype)
    return load_model(
        **location_of(tuning["base"]),
        task=tuning["task"],
        label_map=label_map,
        quantization=quantization,
        pad_token_id=pad_token_id,
        **options,
    )


@contextmanager
def without_peft_warning() -> Iterator[None]:
    """Hide that peft 0.21 reads a property which transformers 5.24 has renamed."""
    # Whoever runs this project can do nothing about it.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        yield


def attach_adapter(base: PreTrainedModel, folder: Path) -> Any:
    """Add a stored adapter to a loaded base model, frozen; the base gets the adapter's vocabulary if that is another.

    Args:
        base: the model that the adapter was trained on; it gets wrapped in place.
        folder: a tuned model of the method ``lora`` or ``qlora``, or any folder that peft has written.

    Returns:
        The PEFT model in evaluation mode.

    Raises:
        UserError: the folder has no adapter in safetensors, or one of another model.
    """
    from safetensors import SafetensorError

    from lm_tuning.models.quantization import import_bitsandbytes

    import_bitsandbytes()  # before PEFT, which imports it too
    from peft import PeftModel

    folder = Path(folder)
    names = ("adapter_config.json", "adapter_model.safetensors")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder} has no adapter: {' and '.join(missing)} missing.")
    try:
        # Training here never adds tokens, but an adapter from elsewhere may have been trained on a larger vocabulary.
        _match_vocabulary(base, folder)
        with without_peft_warning():
            model = PeftModel.from_pretrained(base, str(folder), is_trainable=False)
        take_stored_settings(base, folder)
        return model.requires_grad_(False).eval()
    except SafetensorError as error:
        raise UserError(f"The adapter in {folder} is damaged ({error}). Train again or copy it again.") from error
    # torch's list of names and shapes that do not fit is long; its first line says what is wrong.
    except (RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"The adapter in {folder} does not fit its base model: {first}") from error


def merge_adapter(model: Any) -> bool:
    """Add an adapter to the weights of its base, which then answers as fast as the base alone.

    It stays as it is where merging would give another model: beside quantized weights, which would be rounded once
    more, where the weight belongs to two modules, such as a head tied to the embedding, of which it adapts one, and
    where the adapter has biases.

    Args:
        model: a language model on its device, wrapped or not. It is of no use for training afterwards: taking an
            adapter out again leaves rounding errors in the weights.

    Returns:
        Whether the adapter was merged.
    """
    if not hasattr(model, "merge_adapter"):
        return False
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer

    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    adapted = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    # A bias of the adapter's own has no place in a layer without one.
    if any(any(getattr(module, "lora_bias", {}).values()) for module in adapted):
        return False
    weights = [getattr(module.get_base_layer(), "weight", None) for module in adapted]
    for weight in weights:
        # A quantized weight has a type of its own, whatever the dtype it is stored in.
        if type(weight) is not torch.nn.Parameter or not weight.is_floating_point() or uses[id(weight)] > 1:
            return False
    if not weights:
        return False
    model.merge_adapter()
    return True


def _match_vocabulary(base: Any, folder: Path) -> None:
    """Resize the base's embedding to the one that an adapter brings along, or say that none comes for added tokens."""
    from safetensors import safe_open

    rows = base.get_input_embeddings().weight.shape[0]  # of (vocabulary, width)
    # By its ending, since peft puts a path of wrappers before a weight's name.
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        stored = {file.get_slice(key).get_shape()[0] for key in file.keys() if key.endswith(_EMBEDDINGS)}
    if stored:
        wanted = stored.pop()
        if wanted != rows:
            logger.info(
                "The adapter in %s has an embedding of %d tokens; the base's embedding is resized from %d.",
                folder,
                wanted,
                rows,
            )
            # Without drawing new rows around the mean of the old ones: the adapter's embedding replaces them all.
            base.resize_token_embeddings(wanted, mean_resizing=False)
        return
    # A vocabulary that grew without its embedding: ids beyond the table would end the first forward pass.
    num_tokens = _count_tokens(folder)
    if num_tokens > rows:
        raise UserError(
            f"The tokenizer in {folder} has {num_tokens} tokens, but its base model embeds {rows} and the adapter "
            "brings no larger embedding along: what was learned about the added tokens was not saved. Save the adapter "
            "again with save_embedding_layers=True."
        )


def _count_tokens(folder: Path) -> int:
    """Return one more than the largest id among the tokens that were added to a tokenizer, 0 without a tokenizer."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return 0
    added = json.loads(path.read_text(encoding="utf-8")).get("added_tokens") or []
    return max((int(token["id"]) + 1 for token in added), default=0)
