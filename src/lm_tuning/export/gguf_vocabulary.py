"""Turn a tokenizer into the vocabulary of a GGUF, or say why it has none."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Everything that the known ways to split tell apart: contractions in both cases, runs of digits of one to five and of
# other scripts, combining marks, runs of every white space, punctuation before letters and before line ends.
_PROBE = (
    "It's HE'LL they'Ve I'd we'RE can't don'T a's 'x ''ll _foo (bar) [x]/y\\z don\u2019t\n"
    " 1 22 333 4444 55555 1234567 3.14 v2x10 \u0663\u0664\u0665 \u2167\u00bd \u00b2\u2075 x\u2083 7\u0966"
    "\u0967\u0968\n\n"
    "\tone  two   three    \n \n\t \r\n\r\nend \n  x\u00a0y\u3000z \u2028w\n\n\n   !!! ??\n...\r\n-- =>{}\n;"
    "e\u0301te\u0301 na\u00efve \u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22 \u0939\u093f\u0928\u094d\u0926\u0940 "
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \uc548\ub155\ud558\uc138\uc694 12\uac1c \u3042\u3044\u3046\u30a2\u30a4 "
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u0645\u0631\u062d\u0628\u0627 \U0001f600\U0001f3fd\u200d\U0001f680 #tag "
    "@me a_b c-d 50% $9.99 <b>x</b> && || ~~ ^^\t\ttail  "
)
_TYPE_NORMAL, _TYPE_CONTROL, _TYPE_USER_DEFINED, _TYPE_UNUSED = 1, 3, 4, 5


@dataclass(frozen=True)
class GgufVocabulary:
    """What llama.cpp needs to make the same tokens of a text.

    Attributes:
        pre_tokenizer: llama.cpp's name of the way to split a text before merging.
        tokens: by id.
        types: of each token: 1 normal, 3 control, 4 added and shown, 5 unused.
        merges: two tokens with a space between, the first that was learned first.
        special_ids: ids of ``bos``, ``eos``, ``pad`` and ``unk``, as far as there are any.
        stop_ids: further tokens at which an answer stops, beside EOS.
        adds_bos: whether BOS is put before a text.
        adds_eos: whether EOS is put behind it.
        chat_template: in Jinja.
        notes: what is not quite the same.
    """

    pre_tokenizer: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    special_ids: dict[str, int]
    stop_ids: list[int]
    adds_bos: bool
    adds_eos: bool
    chat_template: str | None
    notes: list[str]


def find_tokenizer_problems(tokenizer: Any) -> list[str]:
    """Return why llama.cpp would make other tokens of a text.

    Args:
        tokenizer: as transformers loads it.

    Returns:
        Sentences without their subject; none where the vocabulary can be written.
    """
    if not getattr(tokenizer, "is_fast", False):
        return ["is written in Python, and GGUF has only tokenizers of tokenizer.json"]
    facts = json.loads(tokenizer.backend_tokenizer.to_str())
    model = facts["model"]
    if model["type"] != "BPE" or model.get("byte_fallback") or not _is_byte_level(facts.get("decoder")):
        return ["is no byte-level BPE, which is the only kind whose segments are written here"]
    problems = [
        f"sets {name} = {model[name]!r}, which GGUF cannot say"
        for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
        if model.get(name)
    ]
    if _pre_tokenizer_of(tokenizer) is None:
        known = ", ".join(_known_splits())
        problems.append(f"splits a text in a way that has no name in llama.cpp that is known here (known: {known})")
    elif bool(model.get("ignore_merges")) != (_pre_tokenizer_of(tokenizer) == "llama-bpe"):
        # llama.cpp takes this from the name of the split.
        problems.append(
            f"sets ignore_merges = {model.get('ignore_merges')!r}, which llama.cpp does not beside its split"
        )
    normalizer = facts.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":
        problems.append(f"changes a text before it is split ({normalizer.get('type')}), which llama.cpp does not")
    odd = [
        token["content"]
        for token in facts["added_tokens"]
        if token["lstrip"] or token["rstrip"] or token["single_word"]
    ]
    if odd:
        problems.append(
            f"has added tokens that take spaces or whole words ({', '.join(odd[:4])}), which GGUF cannot say"
        )
    if any(" " in segment for merge in model["merges"] for segment in merge):
        problems.append("merges segments with a space in them, which GGUF cannot say")
    if _frame_of(tokenizer) is None:
        problems.append("puts other tokens around a text than BOS before and EOS behind it")
    return problems


def read_vocabulary(tokenizer: Any, *, num_embeddings: int, stop_ids: list[int]) -> GgufVocabulary:
    """Return the vocabulary.

    Args:
        tokenizer: one of which :func:`find_tokenizer_problems` says nothing.
        num_embeddings: rows of the embedding; those without a token get names that no text has.
        stop_ids: every token at which an answer stops.
    """
    facts = json.loads(tokenizer.backend_tokenizer.to_str())
    by_id = {index: (token, _TYPE_NORMAL) for token, index in facts["model"]["vocab"].items()}
    for token in facts["added_tokens"]:
        by_id[token["id"]] = (token["content"], _TYPE_CONTROL if token["special"] else _TYPE_USER_DEFINED)
    whole = [by_id.get(index, (f"[PAD{index}]", _TYPE_UNUSED)) for index in range(num_embeddings)]
    name, frame = _pre_tokenizer_of(tokenizer), _frame_of(tokenizer)
    assert name is not None
    assert frame is not None
    ids = {
        kind: getattr(tokenizer, f"{kind}_token_id")
        for kind in ("bos", "eos", "pad", "unk")
        if getattr(tokenizer, f"{kind}_token_id") is not None
    }
    notes = []
    if facts.get("normalizer") is not None:
        notes.append("llama.cpp does not compose characters (NFC) as the tokenizer does: give it composed text.")
    template = tokenizer.chat_template
    return GgufVocabulary(
        pre_tokenizer=name,
        tokens=[token for token, _ in whole],
        types=[kind for _, kind in whole],
        merges=[" ".join(merge) for merge in facts["model"]["merges"]],
        special_ids=ids,
        stop_ids=[index for index in stop_ids if index != ids.get("eos")],
        adds_bos=frame[0],
        adds_eos=frame[1],
        chat_template=template if isinstance(template, str) else None,
        notes=notes,
    )


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    return decoder is not None and decoder["type"] == "ByteLevel"


def _frame_of(tokenizer: Any) -> tuple[bool, bool] | None:
    """Return whether BOS stands before a text and EOS behind it; nothing of another frame."""
    inner = list(tokenizer("a", add_special_tokens=False).input_ids)
    framed = list(tokenizer("a").input_ids)
    for bos in (False, True):
        for eos in (False, True):
            before = [tokenizer.bos_token_id] if bos else []
            behind = [tokenizer.eos_token_id] if eos else []
            if [*before, *inner, *behind] == framed:
                return bos, eos
    return None


@functools.cache
def _known_splits() -> dict[str, list[str]]:
    """Return what the ways to split that llama.cpp names make of the probe.

    Source: ``llama_vocab`` of llama.cpp, which has the expression of each name.
    """
    from tokenizers import Regex, pre_tokenizers

    def chat(digits: str) -> Any:
        letters = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
        expression = Regex(_CONTRACTIONS + letters + digits + _REST)
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(expression, behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    known = {
        "gpt-2": plain,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain]),
        "llama-bpe": chat(r"\p{N}{1,3}"),
        "qwen2": chat(r"\p{N}"),
    }
    return {name: _segments(split) for name, split in known.items()}


def _segments(split: Any) -> list[str]:
    return [segment for segment, _ in split.pre_tokenize_str(_PROBE)]


def _pre_tokenizer_of(tokenizer: Any) -> str | None:
    """Return llama.cpp's name of how a tokenizer splits, found by what it makes of the probe."""
    split = tokenizer.backend_tokenizer.pre_tokenizer
    if split is None:
        return None
    segments = _segments(split)
    return next((name for name, known in _known_splits().items() if known == segments), None)
