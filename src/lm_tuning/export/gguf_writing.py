"""Write a model folder as one GGUF file, weight by weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_tuning.errors import UserError
from lm_tuning.export.gguf_vocabulary import GgufVocabulary
from lm_tuning.parameters.export import GgufType

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Model types that are written, by the name that transformers and llama.cpp both have for them."""
BLOCK_SIZE = 32
"""Numbers of a block of quantized weights, which share a scale."""
_SCALED_ROPE = {
    "llama": ("default", "linear", "llama3"),
    "qwen2": ("default", "linear"),
    "qwen3": ("default", "linear"),
}
# The embedding is a table that is read row by row, and the head decides between near tokens: both suffer first.
_FINE_TENSORS = ("token_embd.weight", "output.weight")


@dataclass(frozen=True)
class _Source:
    """A weight of the folder, and where it goes."""

    name: str
    target: str
    shape: tuple[int, ...]
    read: Callable[[], Any]


def find_architecture_problems(config: Any, quantization: GgufType) -> list[str]:
    """Return why llama.cpp would compute something else than the model does.

    Args:
        config: of the model.
        quantization: of the weights.

    Returns:
        Sentences without their subject; none where the model can be written.
    """
    kind = str(config.model_type)
    if kind not in ARCHITECTURES:
        return [f"is of the family {kind}; written are {', '.join(ARCHITECTURES)}"]
    problems = []
    rope = dict(config.rope_parameters or {})
    rope_type = rope.get("rope_type", "default")
    if rope_type not in _SCALED_ROPE[kind]:
        allowed = ", ".join(_SCALED_ROPE[kind])
        problems.append(f"scales its rotary embedding by {rope_type}; written are {allowed} for {kind}")
    if float(rope.get("partial_rotary_factor", 1.0)) != 1.0:
        problems.append("rotates a part of each head only")
    if config.hidden_act != "silu":
        problems.append(f"has the activation {config.hidden_act}; llama.cpp computes silu")
    if getattr(config, "use_sliding_window", False):
        problems.append("attends within a sliding window, which GGUF has not for this family")
    if kind == "qwen3" and config.attention_bias:
        problems.append("has biases in its attention, which llama.cpp does not read for qwen3")
    widths = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "width of all heads": _head_size(config) * config.num_attention_heads,
    }
    odd = [f"{name} = {width}" for name, width in widths.items() if width % BLOCK_SIZE]
    if quantization != "none" and odd:
        problems.append(
            f"has {' and '.join(odd)}, no multiple of {BLOCK_SIZE}, so its weights have no whole blocks: set "
            "export.gguf.quantization = none"
        )
    return problems


def write_gguf(
    folder: Path,
    target: Path,
    vocabulary: GgufVocabulary,
    *,
    dtype: str,
    quantization: GgufType,
    name: str,
    on_tensor: Callable[[int, int], None],
) -> None:
    """Write the file; one weight at a time is in memory.

    Args:
        folder: config and safetensors of a model.
        target: the file.
        vocabulary: of the model.
        dtype: of matrices that are not quantized; vectors are in float32, as llama.cpp wants them.
        quantization: of matrices.
        name: of the model.
        on_tensor: told the weights written and their number.

    Raises:
        UserError: a weight has no name in the file.
    """
    import gguf
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(folder)
    writer = gguf.GGUFWriter(target, config.model_type)
    _write_settings(writer, config, vocabulary, name=name)
    writer.add_file_type(_file_type(dtype, quantization))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    with ExitStack() as opened:
        sources = list(_sources_of(folder, config, opened))
        for source in sources:
            kind = _type_of(source, dtype, quantization)
            byte_shape = gguf.quant_shape_to_byte_shape(source.shape, kind)
            size = int(_product(byte_shape))
            # The shape of numbers; that of bytes is for arrays of blocks.
            writer.add_tensor_info(source.target, source.shape, _float32(), size, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, source in enumerate(sources):
            on_tensor(done, len(sources))
            numbers = _encode(source.read(), _type_of(source, dtype, quantization))
            writer.write_tensor_data(numbers)
        on_tensor(len(sources), len(sources))
    writer.close()


def _write_settings(writer: Any, config: Any, vocabulary: GgufVocabulary, *, name: str) -> None:
    import gguf

    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(_head_size(config))
    writer.add_value_length(_head_size(config))
    writer.add_rope_dimension_count(_head_size(config))
    writer.add_vocab_size(len(vocabulary.tokens))
    rope = dict(config.rope_parameters)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.pre_tokenizer)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    for kind, index in vocabulary.special_ids.items():
        getattr(writer, f"add_{kind}_token_id")(index)
    # llama.cpp has keys for two more tokens at which an answer stops, and knows others by name; that each of them ends
    # one is checked.
    for add, index in zip((writer.add_eot_token_id, writer.add_eom_token_id), vocabulary.stop_ids, strict=False):
        add(index)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(vocabulary.adds_eos)
    writer.add_add_space_prefix(False)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)


def _sources_of(folder: Path, config: Any, opened: ExitStack) -> Iterator[_Source]:
    """Find the name of each weight in the file."""
    import gguf
    from safetensors import safe_open

    kind = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
    names = gguf.get_tensor_name_map(kind[config.model_type], config.num_hidden_layers)
    unknown = []
    for path in sorted(folder.glob("*.safetensors")):
        file: Any = opened.enter_context(safe_open(path, framework="pt"))
        for name in sorted(file.keys()):
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue  # llama.cpp takes the embedding where there is no head
            target = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if target is None:
                unknown.append(name)
                continue
            yield _Source(name, target, tuple(file.get_slice(name).get_shape()), _reader_of(file, name, config))
    if unknown:
        raise UserError(
            f"The model has weights that have no name in a GGUF of {config.model_type}: {', '.join(unknown[:4])}. Set "
            "export.format = merged."
        )
    if dict(config.rope_parameters).get("rope_type") == "llama3":
        factors = _rope_factors(config)
        yield _Source("rope", "rope_freqs.weight", tuple(factors.shape), lambda: factors)


def _reader_of(file: Any, name: str, config: Any) -> Callable[[], Any]:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    module = name.rsplit(".", 2)[-2]
    if config.model_type != "llama" or module not in heads:
        return lambda: file.get_tensor(name)
    return lambda: _interleave(file.get_tensor(name), heads[module])


def _interleave(weight: Any, num_heads: int) -> Any:
    """Order a head's rows as llama.cpp rotates them for llama: neighbours, where transformers rotates two halves.

    Args:
        weight: ``(heads * head size, ...)``.
        num_heads: that it has.
    """
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def _rope_factors(config: Any) -> Any:
    """Return what each frequency of the rotary embedding is divided by, ``(half of a head,)``."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    size = _head_size(config)
    plain = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
    return (plain / scaled).float()


def _type_of(source: _Source, dtype: str, quantization: GgufType) -> Any:
    import gguf

    kinds = gguf.GGMLQuantizationType
    if len(source.shape) == 1:
        return kinds.F32
    if quantization == "none":
        return {"float32": kinds.F32, "float16": kinds.F16, "bfloat16": kinds.BF16}[dtype]
    return kinds.Q8_0 if source.target in _FINE_TENSORS else kinds[quantization.upper()]


def _file_type(dtype: str, quantization: GgufType) -> int:
    import gguf

    types = gguf.LlamaFileType
    if quantization != "none":
        return int(types[f"MOSTLY_{quantization.upper()}"])
    return int({"float32": types.ALL_F32, "float16": types.MOSTLY_F16, "bfloat16": types.MOSTLY_BF16}[dtype])


def _encode(weight: Any, kind: Any) -> npt.NDArray[Any]:
    """Return a weight's bytes in the file."""
    import gguf

    numbers: npt.NDArray[np.float32] = weight.float().contiguous().numpy()
    encoded: npt.NDArray[Any] = gguf.quantize(numbers, kind)
    return encoded


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _float32() -> Any:
    import numpy as np

    return np.dtype(np.float32)


def _product(shape: tuple[int, ...]) -> int:
    import math

    return math.prod(shape)
