"""Tiny models of the families that a GGUF is written of, with a byte-level tokenizer that llama.cpp has too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.tiny import CHAT_TEMPLATE

SPECIALS = ["<pad>", "<bos>", "<|end|>", "<|user|>", "<|assistant|>"]
PAD, BOS, END, USER, ASSISTANT = range(len(SPECIALS))
NUM_UNUSED = 3
"""Rows of the embedding that no token has."""
_TEXTS = [f"what is {number}? it is {number} cats, dogs and birds.\n" for number in range(60)] + ["안녕하세요 세계"]


def make_byte_tokenizer(split: Any = None, *, chat_template: str | None = CHAT_TEMPLATE) -> Any:
    """Train a byte-level BPE on a few texts."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = split or pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_TEXTS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token="<|end|>", pad_token="<pad>", model_max_length=512
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def make_family(family: str, *, tied: bool = True, **changes: Any) -> Any:
    """Build a random model whose answers differ from prompt to prompt."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {
        "vocab_size": len(make_byte_tokenizer()) + NUM_UNUSED,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": BOS,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "tie_word_embeddings": tied,
        "initializer_range": 0.1,
    }
    options |= {"head_dim": 128} if family == "qwen3" else {}
    config = AutoConfig.for_model(family, **(options | changes))
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    torch.random.set_rng_state(state)
    return model.eval()


def save_family(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """Write model and tokenizer as an ordinary folder."""
    folder.mkdir(parents=True, exist_ok=True)
    make_family(family, **changes).save_pretrained(folder)
    make_byte_tokenizer().save_pretrained(folder)
    return folder


def chat_row(question: str, answer: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Tokenize one turn; the answer and its end are supervised."""
    tokenizer = make_byte_tokenizer()
    prompt = [USER, *tokenizer(question).input_ids, END, ASSISTANT]
    reply = [*tokenizer(answer).input_ids, END]
    return [*prompt, *reply], [(len(prompt), len(prompt) + len(reply))]


def save_tuned_family(folder: Path, base: Path, *, tokens_key: str, **facts: Any) -> Path:
    """Store an adapter of a saved family as the training does."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from lm_tuning.models.base_model import describe_base_model

    loaded: Any = AutoModelForCausalLM.from_pretrained(base)
    model: Any = get_peft_model(loaded, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    make_byte_tokenizer().save_pretrained(folder)
    tuning = {
        "method": "lora",
        "base": describe_base_model(str(base)),
        "tokens_key": tokens_key,
        "finished_step": 3,
        "tokens_per_second": 1234.5,
        **facts,
    }
    (folder / "tuning.json").write_text(json.dumps(tuning))
    return folder
