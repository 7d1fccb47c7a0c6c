"""Load tokenizers and models of each task from a folder or the hub, with errors that say how to fix it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lm_tuning.errors import UserError
from lm_tuning.models import structure
from lm_tuning.models.folders import check_tokenizer_files, check_weight_files, existing_folder, is_local
from lm_tuning.models.generation_settings import clean_generation_settings
from lm_tuning.models.hub import check_hub_weights, may_download, user_errors
from lm_tuning.models.quantization import Quantization, check_quantization, prepare_quantized
from lm_tuning.wording import count_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

NUM_SHOWN = 3
# Tokens that were put into vocabularies to pad with, or to be free. "<|endoftext|>" separates documents while
# pretraining; a chat model that ends its turns with another token never has to produce it.
PAD_NAMES = (
    "<pad>",
    "<|pad|>",
    "[PAD]",
    "<|finetune_right_pad_id|>",
    "<|padding|>",
    "<|endoftext|>",
    "<|reserved_special_token_0|>",
    "<unk>",
    "[UNK]",
)


def choose_pad_token(tokenizer: Any) -> str:
    """Choose a pad token that is neither the EOS token nor a new one.

    A new token would need a larger embedding, which makes an adapter of half a megabyte one of hundreds. Padding
    with the EOS token is harmless here because loss masks come from spans and never from comparing ids, yet other
    tools that read the model may mask by id, so it comes last.

    Args:
        tokenizer: a transformers tokenizer; it is not changed.

    Raises:
        UserError: the tokenizer has neither a usable special token nor an EOS token.
    """
    pad, eos, unk = tokenizer.pad_token, tokenizer.eos_token, tokenizer.unk_token
    if pad is not None and pad != eos:
        return str(pad)
    # What the template writes belongs to the text. Several templates come as a mapping, which is not searched.
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    # Control tokens alone: padding with an ordinary one would look like text to whoever reads a batch.
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    if tokenizer.unk_token_id is not None:
        special.add(unk)
    for name in PAD_NAMES:
        if name in special and name not in (eos, tokenizer.bos_token) and name not in template:
            return name
    if eos is None:
        raise UserError(
            "The tokenizer has no pad token, no EOS token and no special token to pad with. Set its pad_token."
        )
    return str(eos)


def load_tokenizer(name_or_path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load a fast tokenizer, ready for training: right padding and a pad token.

    Args:
        name_or_path: a local folder or a hub name.
        revision: branch, tag or commit on the hub.
        trust_remote_code: whether code that comes with the model may run.

    Returns:
        A transformers tokenizer with ``padding_side`` ``right`` and a pad token from ``choose_pad_token``.

    Raises:
        UserError: the folder or hub name cannot be read, or has no fast tokenizer.
    """
    from transformers import AutoTokenizer

    if is_local(name_or_path):
        check_tokenizer_files(existing_folder(name_or_path))
    with user_errors(name_or_path, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(
            name_or_path,
            revision=revision,
            trust_remote_code=trust_remote_code,
            local_files_only=not may_download(name_or_path),
        )
    if not tokenizer.is_fast:
        raise UserError(
            f"The tokenizer of {name_or_path} has no fast version (tokenizer.json), whose character positions the "
            "loss masks are made from. Convert it once with transformers and save it into the model folder."
        )
    # A fact of this moment, which would be saved with the tokenizer.
    tokenizer.init_kwargs.pop("local_files_only", None)
    tokenizer.padding_side = "right"
    # An existing token: a new one would need a larger embedding.
    tokenizer.pad_token = choose_pad_token(tokenizer)
    return tokenizer


def load_model(
    name_or_path: str,
    *,
    task: str = "causal_lm",
    label_map: dict[str, int] | None = None,
    quantization: Quantization | None = None,
    revision: str | None = None,
    dtype: str = "float32",
    attention: str = "auto",
    trust_remote_code: bool = False,
    device: str = "cpu",
    pad_token_id: int | None = None,
) -> PreTrainedModel:
    """Load a model of a task from safetensors.

    Args:
        name_or_path: a local folder or a hub name.
        task: ``causal_lm``, ``sequence_classification`` (a causal model with a head) or ``seq2seq_lm``.
        label_map: id of each class by its name, for classification; ``None`` takes the classes that the model knows.
        quantization: how frozen weights are held in fewer bits; ``None`` holds all in ``dtype``.
        revision: branch, tag or commit on the hub.
        dtype: type of the weights that are not quantized: ``float32``, ``bfloat16`` or ``float16``. A classification
            head is float32 whatever it is.
        attention: ``auto`` (transformers chooses), ``sdpa``, ``eager`` or ``flash_attention_2``.
        trust_remote_code: whether code that comes with the model may run.
        device: where the weights go, for example ``cpu`` or ``cuda:0``.
        pad_token_id: id to pad with; ``None`` takes the one that ``load_tokenizer`` sets for this model.

    Returns:
        The model in evaluation mode, its pad id set in ``config`` and ``generation_config``. A classifier has
        ``lm_tuning_fresh_head``: whether its head ``score`` is a new, random one.

    Raises:
        UserError: the model cannot be reached or read, lacks weights, is none for the task, or cannot be quantized
            here, or the attention is not available.
    """
    import torch

    if is_local(name_or_path):
        check_weight_files(existing_folder(name_or_path))
    else:
        # Only the index: from_pretrained would download everything before it opens what the index names.
        check_hub_weights(name_or_path, revision=revision)
    if pad_token_id is None:
        tokenizer = load_tokenizer(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
        pad_token_id = int(tokenizer.pad_token_id)
    config, auto_class, keeps_head, was_classifier = _prepare(
        name_or_path, task=task, label_map=label_map, revision=revision, trust_remote_code=trust_remote_code
    )
    device_map: Any = None if device == "cpu" else device
    if quantization is not None:
        check_quantization(device)
        # Quantized layers cannot be moved later, so they are made where they stay, on a CPU too.
        device_map = {"": device}
    with user_errors(name_or_path, "model"), _without_load_report():
        loaded: Any = auto_class.from_pretrained(
            name_or_path,
            config=config,
            revision=revision,
            dtype=getattr(torch, dtype),
            attn_implementation=None if attention == "auto" else attention,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            # Told by _check_complete, which says how to fix it.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            device_map=device_map,
            quantization_config=None if quantization is None else quantization.to_config(),
            local_files_only=not may_download(name_or_path),
        )
    model, info = loaded
    _check_complete(
        name_or_path,
        missing=sorted(info["missing_keys"]),
        mismatched=sorted(name for name, *_ in info["mismatched_keys"]),
        may_lack_head=task == "sequence_classification" and not keeps_head,
    )
    if task == "sequence_classification":
        structure.check_head(model, name_or_path)
        structure.settle_head(model, is_fresh=not keeps_head, was_stored=was_classifier)
    if quantization is not None:
        prepare_quantized(model)
    _set_padding(model, pad_token_id, name_or_path)
    # Now, since transformers would only refuse when the trained model is saved.
    clean_generation_settings(model, name_or_path)
    return model.eval()  # type: ignore[no-any-return]


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Keep transformers' table of missing and unexpected weights out of the log."""
    # A new head is missing by design, and everything else in the table is an error that _check_complete words.
    log = logging.getLogger("transformers.modeling_utils")

    def keep(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    log.addFilter(keep)
    try:
        yield
    finally:
        log.removeFilter(keep)


def build_skeleton(
    name_or_path: str,
    *,
    task: str = "causal_lm",
    label_map: dict[str, int] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Build the modules of a model without weights, which takes a fraction of a second.

    Args:
        name_or_path: a local folder or a hub name.
        task: as for :func:`load_model`.
        label_map: as for :func:`load_model`.
        revision: branch, tag or commit on the hub.
        trust_remote_code: whether code that comes with the model may run.

    Returns:
        The model on the ``meta`` device: names and shapes are those of the loaded one.

    Raises:
        UserError: the config cannot be reached or read, or is none for the task.
    """
    import torch

    config, auto_class, *_ = _prepare(
        name_or_path, task=task, label_map=label_map, revision=revision, trust_remote_code=trust_remote_code
    )
    # On this device weights have a shape and no numbers, so that a model of any size takes no memory.
    with user_errors(name_or_path, "model"), torch.device("meta"):
        model = auto_class.from_config(config, trust_remote_code=trust_remote_code)
    if task == "sequence_classification":
        structure.check_head(model, name_or_path)
    return model


def read_config(name_or_path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Read the config of a model, without torch.

    Args:
        name_or_path: a local folder or a hub name.
        revision: branch, tag or commit on the hub.
        trust_remote_code: whether code that comes with the model may run.

    Raises:
        UserError: the config cannot be reached or read.
    """
    from transformers import AutoConfig

    with user_errors(name_or_path, "model"):
        return AutoConfig.from_pretrained(
            name_or_path,
            revision=revision,
            trust_remote_code=trust_remote_code,
            local_files_only=not may_download(name_or_path),
        )


def check_model(
    name_or_path: str, *, task: str = "causal_lm", revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Check by its config that a model is one for the task, before anything is spent on it.

    Args:
        name_or_path: a local folder or a hub name.
        task: as for :func:`load_model`.
        revision: branch, tag or commit on the hub.
        trust_remote_code: whether code that comes with the model may run.

    Returns:
        The config.

    Raises:
        UserError: the config cannot be reached or read, or is none for the task.
    """
    import transformers

    config = read_config(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    _check_architecture(config, getattr(transformers, structure.AUTO_CLASSES[task]), name_or_path, task)
    return config


def _prepare(
    name_or_path: str, *, task: str, label_map: dict[str, int] | None, revision: str | None, trust_remote_code: bool
) -> tuple[Any, Any, bool, bool]:
    """Read the config and write the labels into it.

    Returns:
        The config, the class that loads the task, whether a stored classification head fits, and whether there is one.
    """
    import transformers

    config = check_model(name_or_path, task=task, revision=revision, trust_remote_code=trust_remote_code)
    auto_class: Any = getattr(transformers, structure.AUTO_CLASSES[task])
    # Asked before the labels are written: afterwards every config looks like that of a classifier.
    was_classifier = structure.stored_labels(config) is not None
    keeps_head = task == "sequence_classification" and structure.write_labels(config, label_map, name_or_path)
    return config, auto_class, keeps_head, was_classifier


def _check_architecture(config: Any, auto_class: Any, name_or_path: str, task: str) -> None:
    """Refuse a model whose architecture is made for something else, before its weights are read."""
    reads_apart = structure.has_encoder(config)
    if reads_apart != (task == "seq2seq_lm"):
        kinds = ("an encoder-decoder", "a decoder alone")
        is_kind, wanted = kinds if reads_apart else kinds[::-1]
        raise UserError(
            f"{name_or_path} ({config.model_type}) is {is_kind}, and task = {task} needs {wanted}: set task = "
            f"{'seq2seq_lm' if reads_apart else 'causal_lm'}, or take another model."
        )
    # Architectures that transformers does not know come with code, and name their class for the task in auto_map.
    own_code = getattr(config, "auto_map", None) or {}
    if type(config) not in auto_class._model_mapping and auto_class.__name__ not in own_code:
        raise UserError(
            f"{name_or_path} is of the architecture {config.model_type}, for which transformers has no model of task = "
            f"{task}."
        )
    stored = getattr(config, "quantization_config", None)
    if stored is not None:
        # A dict as read from config.json, or what transformers made of it.
        method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
        raise UserError(
            f"The weights in {name_or_path} are stored quantized ({method}), which decides their precision for good. "
            "Take the model in 16 or 32 bits; train.method = qlora quantizes it while it is loaded."
        )
    if reads_apart and getattr(config, "decoder_start_token_id", None) is None:
        raise UserError(f"config.json of {name_or_path} has no decoder_start_token_id, which a target starts from.")


def _check_complete(name_or_path: str, *, missing: list[str], mismatched: list[str], may_lack_head: bool) -> None:
    """Refuse weights that transformers would fill up with random numbers; a classifier's head may be new."""
    if may_lack_head:
        missing, mismatched = (
            [name for name in names if not name.startswith(f"{structure.HEAD}.")] for names in (missing, mismatched)
        )
    if missing or mismatched:
        names = ", ".join([*missing, *mismatched][:NUM_SHOWN])
        raise UserError(
            f"The weights of {name_or_path} do not fit its config: {count_of(len(missing), 'tensor')} missing, "
            f"{len(mismatched)} of another shape (first: {names}). They would be random, so the model is not used."
        )


def _set_padding(model: Any, pad_token_id: int, name_or_path: str) -> None:
    """Write the pad id wherever the model looks for one."""
    import torch

    # (vocabulary, width); often more rows than the tokenizer has tokens, since sizes are rounded up.
    num_embeddings = model.get_input_embeddings().weight.shape[0]
    if pad_token_id >= num_embeddings:
        raise UserError(
            f"The pad token of {name_or_path} has id {pad_token_id}, but the model embeds ids below {num_embeddings}. "
            "Set the tokenizer's pad_token to a token that the model knows."
        )
    configs = (model.config, model.config.get_text_config(), getattr(model, "generation_config", None))
    for config in configs:
        if config is not None:
            config.pad_token_id = pad_token_id
    # Embeddings forget theirs: torch gives that row no gradient, and where a model was published with its EOS token as
    # padding, the EOS token would never be learned. Real padding gets no gradient anyway, since no loss depends on it.
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
