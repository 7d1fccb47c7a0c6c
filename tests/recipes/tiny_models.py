"""Tiny random models of the architectures that recipes name, as ordinary local folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.tiny import BOS, END, PAD, VOCABULARY, make_tokenizer

BYTE_SPECIALS = ["<pad>", "</s>", "<|endoftext|>"]
BYTE_PAD, BYTE_EOS, BYTE_TEXT_END = range(len(BYTE_SPECIALS))
HIDDEN = 64


def make_byte_tokenizer(*, eos_token: str) -> Any:
    """Build a byte-level tokenizer in memory: one token a byte, so that it reads Korean too."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*BYTE_SPECIALS, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in BYTE_SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=eos_token,
        pad_token="<pad>",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def make_config(architecture: str) -> Any:
    """Return a small configuration: ``qwen3``, ``llama``, ``gpt_neox`` or ``bart``."""
    from transformers import BartConfig, GPTNeoXConfig, LlamaConfig, Qwen3Config

    num_bytes = len(BYTE_SPECIALS) + 256
    small: dict[str, Any] = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4}
    if architecture in {"qwen3", "llama"}:
        decoder = {
            **small,
            "vocab_size": len(VOCABULARY),
            "intermediate_size": 2 * HIDDEN,
            "num_key_value_heads": 2,
            "head_dim": HIDDEN // 4,
            "max_position_embeddings": 4096,
            "bos_token_id": BOS,
            "eos_token_id": END,
            "pad_token_id": PAD,
        }
        return Qwen3Config(**decoder) if architecture == "qwen3" else LlamaConfig(**decoder)
    if architecture == "gpt_neox":
        return GPTNeoXConfig(
            **small,
            vocab_size=num_bytes,
            intermediate_size=4 * HIDDEN,
            max_position_embeddings=2048,
            bos_token_id=BYTE_TEXT_END,
            eos_token_id=BYTE_TEXT_END,
            tie_word_embeddings=False,
        )
    assert architecture == "bart", architecture
    return BartConfig(
        vocab_size=num_bytes,
        d_model=HIDDEN,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=2 * HIDDEN,
        decoder_ffn_dim=2 * HIDDEN,
        max_position_embeddings=1026,
        dropout=0.1,
        # As in KoBART: a decoder starts from the EOS token of a text.
        bos_token_id=BYTE_EOS,
        eos_token_id=BYTE_EOS,
        pad_token_id=BYTE_PAD,
        decoder_start_token_id=BYTE_EOS,
        forced_eos_token_id=BYTE_EOS,
    )


def save_model(folder: Path, architecture: str, *, has_template: bool = True) -> Path:
    """Write a random model with its tokenizer and return the folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = make_config(architecture)
    family: Any = AutoModelForSeq2SeqLM if architecture == "bart" else AutoModelForCausalLM
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    model = family.from_config(config)
    torch.random.set_rng_state(state)
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    if architecture in {"qwen3", "llama"}:
        tokenizer = make_tokenizer() if has_template else make_tokenizer(chat_template=None)
    else:
        tokenizer = make_byte_tokenizer(eos_token="</s>" if architecture == "bart" else "<|endoftext|>")
    tokenizer.save_pretrained(folder)
    return folder
