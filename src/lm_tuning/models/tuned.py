"""Load what a training stored: a model with its adapter, or a model whose own weights were trained."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_tuning.errors import UserError
from lm_tuning.models.loading import load_model, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

FACTS_NAME = "tuning.json"


def read_tuning(folder: Path) -> dict[str, Any]:
    """Read how a tuned model was made.

    Args:
        folder: a tuned model.

    Returns:
        ``method`` (``lora`` or ``full``), ``base`` (see ``describe_base_model``), ``tokens_key``, ``finished_step``
        and whatever else the training noted.

    Raises:
        UserError: the folder is not a tuned model.
    """
    try:
        facts: dict[str, Any] = json.loads((Path(folder) / FACTS_NAME).read_text(encoding="utf-8"))
        method = facts["method"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder} is not a tuned model: it has no readable {FACTS_NAME}.") from error
    if method not in ("lora", "full"):
        raise UserError(f"{folder} was tuned by the method {method!r}; this version knows lora and full.")
    return facts


def load_tuned(
    folder: Path,
    *,
    dtype: str = "float32",
    attention: str = "auto",
    device: str = "cpu",
    base: PreTrainedModel | None = None,
) -> Any:
    """Load a tuned model for evaluation.

    Args:
        folder: a tuned model.
        dtype: type of the weights: ``float32``, ``bfloat16`` or ``float16``.
        attention: ``auto``, ``sdpa``, ``eager`` or ``flash_attention_2``.
        device: where the weights go.
        base: the base model when it is loaded already, for an adapter; it gets wrapped in place.

    Returns:
        A PEFT model (``lora``: ``with model.disable_adapter():`` is the base) or a plain one (``full``).

    Raises:
        UserError: the folder is not a tuned model, or its base cannot be loaded.
    """
    facts = read_tuning(folder)
    if facts["method"] == "full":
        return load_model(str(Path(folder).absolute()), dtype=dtype, attention=attention, device=device)
    if base is None:
        known = facts["base"]
        base = load_model(
            known["name_or_path"],
            revision=known.get("revision"),
            dtype=dtype,
            attention=attention,
            trust_remote_code=bool(known.get("trust_remote_code")),
            device=device,
            pad_token_id=int(load_tokenizer(str(Path(folder).absolute())).pad_token_id),
        )
    return attach_adapter(base, folder)


@contextmanager
def without_peft_warning() -> Iterator[None]:
    """Hide that peft 0.21 reads a property which transformers 5.24 has renamed: no user can mend it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        yield


def attach_adapter(base: PreTrainedModel, folder: Path) -> Any:
    """Put a stored adapter on a loaded base model, frozen.

    Args:
        base: the model that the adapter was trained on; it gets wrapped in place.
        folder: a tuned model of the method ``lora``.

    Returns:
        The PEFT model in evaluation mode.

    Raises:
        UserError: the folder has no adapter in safetensors, or one of another model.
    """
    from peft import PeftModel
    from safetensors import SafetensorError

    folder = Path(folder)
    names = ("adapter_config.json", "adapter_model.safetensors")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder} has no adapter: {' and '.join(missing)} missing.")
    try:
        with without_peft_warning():
            model = PeftModel.from_pretrained(base, str(folder), is_trainable=False)
        return model.requires_grad_(False).eval()
    except SafetensorError as error:
        raise UserError(f"The adapter in {folder} is damaged ({error}). Train again or copy it again.") from error
    except (RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"The adapter in {folder} does not fit its base model: {first}") from error
