"""The default model's own tokenizer, from its converted folder or else straight from the package."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.errors import UserError
from lm_tuning.models.base_model import EMBEDDED_MODEL, find_embedded_gguf, is_converted
from lm_tuning.models.gguf_reading import quick_gguf_parsing
from lm_tuning.models.loading import choose_pad_token, load_tokenizer


@functools.cache
def real_tokenizer() -> Any:
    """Load SmolLM2's tokenizer, or skip the test."""
    folder = Path(__file__).parents[2] / EMBEDDED_MODEL
    if is_converted(folder):
        return load_tokenizer(str(folder))
    from transformers import AutoTokenizer

    try:
        source = find_embedded_gguf()
    except UserError as error:
        pytest.skip(str(error))
    with quick_gguf_parsing():
        tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    tokenizer.pad_token = choose_pad_token(tokenizer)
    return tokenizer
