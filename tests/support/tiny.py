"""A tokenizer whose ids can be written by hand, and a tiny random model that goes with it.

Every printable ASCII character is one token, so a test can spell out ids: ``ids("ab")``.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

SPECIALS = ["<pad>", "<bos>", "<eos>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
PAD, BOS, EOS, UNK, SYSTEM, USER, ASSISTANT, END = range(len(SPECIALS))
CHARACTERS = [*string.printable[:95], "\n"]
VOCABULARY = {token: index for index, token in enumerate([*SPECIALS, *CHARACTERS])}

# "<|user|>2+2?<|end|><|assistant|>4<|end|>": the role marker, the content, the end-of-turn token.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def ids(text: str) -> list[int]:
    """Spell a text without special tokens as ids."""
    return [VOCABULARY.get(character, UNK) for character in text]


def make_tokenizer(
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    eos_token: str = "<|end|>",
    pad_token: str | None = "<pad>",
    adds_bos: bool = False,
) -> Any:
    """Build the character tokenizer in memory."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel(dict(VOCABULARY), unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token=eos_token,
        pad_token=pad_token,
        unk_token="<unk>",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def make_model(*, seed: int = 0, num_layers: int = 2, hidden_size: int = 32, tied: bool = True) -> Any:
    """Build a random Llama of a few thousand weights in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=BOS,
        eos_token_id=END,
        pad_token_id=PAD,
        tie_word_embeddings=tied,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    torch.random.set_rng_state(state)
    return model


def bart_config(**changes: Any) -> Any:
    """Describe an encoder-decoder of one layer each that starts its targets from the EOS token, as BART does."""
    from transformers import BartConfig

    options: dict[str, Any] = {
        "vocab_size": len(VOCABULARY),
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "decoder_start_token_id": EOS,
        "forced_eos_token_id": EOS,
    }
    return BartConfig(**(options | changes))


def save_tiny_model(folder: Path, **tokenizer_options: Any) -> Path:
    """Write model and tokenizer as an ordinary local folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    make_model().save_pretrained(folder)
    make_tokenizer(**tokenizer_options).save_pretrained(folder)
    return folder
