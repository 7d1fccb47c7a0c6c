"""Read a GGUF file through transformers in a fraction of the time that its readers in Python take."""

from __future__ import annotations

import functools
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lm_tuning.progress import OnProgress, ignore_progress

# Rows of quantized blocks that are unpacked at once: fewer cost calls, more leave the processor's cache.
_ROWS_AT_ONCE = 128


@contextmanager
def quick_gguf_parsing(on_progress: OnProgress = ignore_progress) -> Iterator[None]:
    """Parse the GGUF once instead of three times, and build its table of names once instead of for each module.

    What is replaced in the ``gguf`` module and in transformers is put back afterwards: a cached reader keeps the whole
    file mapped.

    Args:
        on_progress: receives the tensors done, in place of the bar that transformers draws.
    """
    import gguf
    from gguf import quants
    from transformers import modeling_gguf_pytorch_utils

    def report(tensors: list[Any], **_: Any) -> Iterator[Any]:
        for done, tensor in enumerate(tensors):
            on_progress("Unpacking weights", done, len(tensors), "tensors")
            yield tensor
        on_progress("Unpacking weights", len(tensors), len(tensors), "tensors")

    with (
        # A model is read from one file, so a cache of one is enough; dropping the cache unmaps the file.
        _replaced(gguf, "GGUFReader", functools.lru_cache(1)(_quick_reader())),
        _replaced(gguf, "get_tensor_name_map", functools.lru_cache(8)(gguf.get_tensor_name_map)),
        _replaced(quants, "_apply_over_grouped_rows", _apply_to_many_rows),
        _replaced(modeling_gguf_pytorch_utils, "_gguf_parse_value", _quick_value()),
        _replaced(modeling_gguf_pytorch_utils, "tqdm", report),
    ):
        yield


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


def _quick_reader() -> Any:
    """Return a reader that takes arrays apart as a whole; the usual one slices a vocabulary's 100,000 texts singly."""
    import gguf

    class QuickReader(gguf.GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
            if raw_type != gguf.GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            item_type = gguf.GGUFValueType(int(self._get(orig_offs, "u4")[0]))
            num_items = int(self._get(orig_offs + 4, "u8")[0])
            begin = orig_offs + 12  # behind the items' type (4 bytes) and their number (8 bytes)
            if item_type == gguf.GGUFValueType.STRING:
                end, parts = self._read_texts(begin, num_items)
            elif item_type in self.gguf_scalar_to_np:
                items = self._get(begin, self.gguf_scalar_to_np[item_type], num_items)
                end, parts = begin + items.nbytes, list(items.reshape(-1, 1))
            else:
                return super()._get_field_parts(orig_offs, raw_type)
            types = [gguf.GGUFValueType.ARRAY, item_type] if num_items else [gguf.GGUFValueType.ARRAY]
            return end - orig_offs, parts, list(range(num_items)), types

        def _read_texts(self, begin: int, num_texts: int) -> tuple[int, list[Any]]:
            """Return where the texts end, and the bytes of each."""
            is_little = (self.byte_order == "I") == (sys.byteorder == "little")  # "I": as on this machine
            length = struct.Struct("<Q" if is_little else ">Q")
            mapped: Any = self.data
            content, texts = memoryview(mapped), []
            for _ in range(num_texts):
                start = begin + length.size
                begin = start + length.unpack_from(content, begin)[0]
                texts.append(bytes(content[start:begin]))
            return begin, texts

    return QuickReader


def _quick_value() -> Callable[[Any, Any], Any]:
    """Return transformers' reading of a value, which need not take the bytes of a text apart and put them together."""
    from transformers.integrations.ggml import _gguf_parse_value

    parse: Callable[[Any, Any], Any] = _gguf_parse_value
    return lambda value, types: value.decode() if isinstance(value, bytes) else parse(value, types)


def _apply_to_many_rows(func: Callable[[Any], Any], arr: Any, otype: Any, oshape: tuple[int, ...]) -> Any:
    """Unpack quantized rows as gguf does, under its names, only more of them at once.

    Args:
        func: unpacks some rows, each by itself.
        arr: bytes, (..., bytes per row).
        otype: dtype of the numbers.
        oshape: of the numbers, (..., numbers per row).
    """
    import numpy as np

    rows = arr.reshape(-1, arr.shape[-1])
    numbers = np.empty((len(rows), oshape[-1]), dtype=otype)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        numbers[start : start + _ROWS_AT_ONCE] = func(rows[start : start + _ROWS_AT_ONCE])
    return numbers.reshape(oshape)
