"""Choose the PAD token of short rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lm_tuning.errors import UserError

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


@dataclass(frozen=True)
class PadChoice:
    """The pad token and why it was taken.

    Attributes:
        token: the token as text.
        id: its id.
        reason: half a sentence for logs and reports.
    """

    token: str
    id: int
    reason: str


def choose_pad_token(tokenizer: Any) -> PadChoice:
    """Choose a pad token that is neither the EOS token nor a new one.

    A new token would need a larger embedding, which makes an adapter of half a megabyte one of hundreds. Padding
    with the EOS token is harmless here because loss masks come from spans and never from comparing ids, yet other
    tools that read the model may mask by id, so it comes last.

    Args:
        tokenizer: a transformers tokenizer; it is not changed.

    Returns:
        The choice.

    Raises:
        UserError: the tokenizer has neither a usable special token nor an EOS token.
    """
    pad, eos = tokenizer.pad_token, tokenizer.eos_token
    if pad is not None and pad != eos:
        return PadChoice(pad, int(tokenizer.pad_token_id), "the tokenizer's own, distinct from the EOS token")
    # What the template writes belongs to the text. Several templates come as a mapping, which is not searched.
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    # Control tokens alone: padding with an ordinary one would look like text to whoever reads a batch.
    special = {str(token): int(index) for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    unk = tokenizer.unk_token
    if unk is not None and tokenizer.unk_token_id is not None:
        special.setdefault(unk, int(tokenizer.unk_token_id))
    for name in PAD_NAMES:
        if name in special and name not in (eos, tokenizer.bos_token) and name not in template:
            return PadChoice(name, special[name], f"an existing special token, unlike the EOS token {eos!r}")
    if eos is None:
        raise UserError(
            "The tokenizer has no pad token, no EOS token and no special token to pad with. Set its pad_token."
        )
    return PadChoice(
        eos, int(tokenizer.eos_token_id), "the EOS token, for lack of a free one; loss masks come from spans, not ids"
    )
