"""Find rows that are almost the same: signatures by MinHash, candidates by banding, units by joining what is similar.

What is compared is all text of a row in lower case with single blanks, as the set of its sequences of six bytes in
UTF-8: six Latin letters, three Cyrillic ones, two Korean, Chinese or Japanese ones. Sequences of five words would leave
a row of three words without any, would see a single word in a text without blanks, and would call a row of twenty words
another one as soon as one word is changed. Two rows are near duplicates when the estimate of their Jaccard similarity
(sequences in both / sequences in either) reaches the threshold; the estimate has a standard deviation of about 0.03.
"""

from __future__ import annotations

import json
import os
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lm_tuning.data.arrays import Ints, Mask
from lm_tuning.data.format.columns import MESSAGES
from lm_tuning.data.format.examples import FIELDS
from lm_tuning.data.split.assign import mixed
from lm_tuning.data.store import ExampleTable
from lm_tuning.json_types import JsonObject
from lm_tuning.progress import OnProgress, ignore_progress

# Slots of a signature. The estimate of a similarity s has the deviation sqrt(s * (1 - s) / 128), at most 0.044.
NUM_SLOTS = 128
SHINGLE_BYTES = 6
MAX_TEXT_BYTES = 2**20

_SEED = 42
# Fewer, longer bands would be faster and let more pairs pass each other by.
_MIN_RECALL = 0.995
# Eight bytes are read at once, from the last position of a text too.
_PADDING = b"\0" * 8
_SHINGLE_MASK = np.uint64(2 ** (8 * SHINGLE_BYTES) - 1)
# What is hashed at once should stay in the cache of a core: a sequence takes about 30 bytes.
_BLOCK_BYTES = 2**17
# Pairs compared at once: two blocks of signatures of 4 MiB.
_CHUNK_PAIRS = 16_384
# Neighbours in a run that each text is compared with: where rows share long passages, thousands of texts agree in a
# band.
_MAX_DISTANCE = 8
# A unit may grow to this many texts, or to this share of all, before its chain is cut.
_MIN_CHAIN_ROWS = 100
_MAX_CHAIN_FRACTION = 0.01
# Characters that only say that a row is a conversation must not make two short ones similar.
_NOT_COMPARED = ("label", "tools")

Positions = npt.NDArray[np.int32]
Signatures = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class NearDuplicates:
    """Which texts belong together.

    Attributes:
        units: ``(texts,)``: equal numbers for texts that belong together, from 0, in the order of the first text of
            each.
        cut_links: ``(links, 2)``: near duplicates that stand in different units, since joining them would have made a
            long chain of texts that are not alike. Every such text is in one of them, not every pair is.
        num_seconds: time it took.
    """

    units: Ints
    cut_links: Ints
    num_seconds: float


def find_near_duplicates(
    table: ExampleTable, indices: Ints, scratch: Path, *, similarity: float, on_progress: OnProgress = ignore_progress
) -> NearDuplicates:
    """Join the texts that are near duplicates of each other, directly or through others.

    The time grows with the number of texts, not with the number of pairs: texts meet when they agree in a band of their
    signatures, and each is compared with at most eight others a band, those first that agree in the next band too. The
    result depends on texts and order alone. Memory is about 60 bytes per text; signatures (256 bytes per text) lie on
    disk.

    A chain, in which each text is similar to the next and the last no longer to the first, is cut where it would grow
    past one in a hundred of all texts (100 texts at least): beyond that, two units are joined only when their first
    texts are similar themselves.

    Args:
        table: the rows.
        indices: ``(texts,)``: the row of each text, without repeats. Their order decides which text of a unit is its
            first, and nothing else does.
        scratch: a file that is written, mapped and removed.
        similarity: from which two texts count as near duplicates, above 0 and at most 1.
        on_progress: told the texts that have a signature, then the bands that were gone through.
    """
    started = time.perf_counter()
    if not len(indices):
        return NearDuplicates(np.zeros(0, dtype=np.int64), np.zeros((0, 2), dtype=np.int64), 0.0)
    try:
        signatures = _map_scratch(scratch, len(indices))
        _write_signatures(table, indices, signatures, on_progress)
        joiner = _Joiner(signatures, similarity)
        num_bands, band_slots = choose_bands(similarity)
        on_progress("Comparing rows", 0, num_bands, "bands")
        for band in range(num_bands):
            joiner.join_band(band, band_slots)
            on_progress("Comparing rows", band + 1, num_bands, "bands")
    finally:
        scratch.unlink(missing_ok=True)
    return NearDuplicates(joiner.units(), joiner.cut_links(), time.perf_counter() - started)


def choose_bands(similarity: float) -> tuple[int, int]:
    """Return the number of bands and the slots of each: the longest bands that still let such pairs meet.

    Args:
        similarity: pairs of this similarity meet in a band with a probability of 0.995 at least.
    """
    # Longer bands make fewer candidates, so the longest that still finds nearly all pairs is the fastest.
    for band_slots in range(NUM_SLOTS, 1, -1):
        num_bands = NUM_SLOTS // band_slots
        if 1 - (1 - similarity**band_slots) ** num_bands >= _MIN_RECALL:
            return num_bands, band_slots
    return NUM_SLOTS, 1


def comparable_texts(rows: dict[str, list[Any]], format: str) -> list[bytes]:
    """Return what is compared of each row.

    Args:
        rows: values by field of the format.
        format: see ``FIELDS``.

    Returns:
        UTF-8 of all text of a row (of a conversation: contents and tool calls), case-folded, with single blanks, up to
        the first mebibyte.
    """
    fields = [rows[name] for name in FIELDS[format] if name not in _NOT_COMPARED]
    if format == MESSAGES:
        texts = ["\n".join(_message_texts(json.loads(text))) for text in fields[0]]
    elif len(fields) == 1:
        texts = fields[0]
    else:
        texts = ["\n".join(part for part in parts if part) for parts in zip(*fields, strict=True)]
    return [" ".join(text.casefold().split()).encode()[:MAX_TEXT_BYTES] for text in texts]


def hash_shingles(texts: list[bytes]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return the hashes of all sequences of six bytes; a shorter text is one sequence.

    Args:
        texts: what ``comparable_texts`` returns.

    Returns:
        The hashes of all texts one after the other, and ``(texts + 1,)``: where those of each text begin.
    """
    lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    flat = np.frombuffer(_PADDING.join([*texts, b""]), dtype=np.uint8)
    # (bytes - 7,): the eight bytes from each position on, as one number, without copying: strides of one byte overlap.
    # The mask takes the last two away; little-endian on any machine, so that signatures are alike.
    windows: npt.NDArray[np.uint64] = np.ndarray(len(flat) - 7, dtype="<u8", buffer=flat, strides=(1,))
    counts = np.maximum(lengths - (SHINGLE_BYTES - 1), 1)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    # (texts,): where each begins in the flat bytes, padding before it counted
    starts = np.cumsum(lengths + len(_PADDING)) - (lengths + len(_PADDING))
    # (sequences,): counts on within a text and jumps to the next one's beginning
    indices = np.repeat(starts - offsets[:-1], counts) + np.arange(offsets[-1])
    return mixed(windows[indices] & _SHINGLE_MASK), offsets.astype(np.uint64)


def sign_texts(texts: list[bytes]) -> Signatures:
    """Return the MinHash signatures, ``(texts, NUM_SLOTS)``: the share of equal slots estimates the similarity.

    Args:
        texts: what ``comparable_texts`` returns.
    """
    from rensa import RMinHash

    hashes, offsets = hash_shingles(texts)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(hashes, offsets, NUM_SLOTS, _SEED)
    # The package hands rows out as lists of Python integers, which go into the array one by one.
    slots = np.fromiter(chain.from_iterable(matrix.to_rows()), dtype=np.uint32, count=len(texts) * NUM_SLOTS)
    # Half of the bits: two different values agree in them once in 65,536 times, and the file is half as long.
    return slots.reshape(-1, NUM_SLOTS).astype(np.uint16)


def _message_texts(messages: list[JsonObject]) -> Iterator[str]:
    for message in messages:
        if isinstance(content := message.get("content"), str):
            yield content
        if calls := message.get("tool_calls"):
            yield json.dumps(calls, ensure_ascii=False)


def _map_scratch(path: Path, num_texts: int) -> Signatures:
    """Map a new file whose room is taken beforehand: a full disk is then an error, and not the end of the process."""
    num_bytes = num_texts * NUM_SLOTS * 2
    with path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        else:
            file.truncate(num_bytes)
    return np.memmap(path, dtype=np.uint16, mode="r+", shape=(num_texts, NUM_SLOTS))


def _write_signatures(table: ExampleTable, indices: Ints, signatures: Signatures, on_progress: OnProgress) -> None:
    # (rows,): number of the row's text, -1 for rows that repeat another one
    text_of_row = np.full(len(table), -1, dtype=np.int32)
    text_of_row[indices] = np.arange(len(indices), dtype=np.int32)
    names = [name for name in FIELDS[table.format] if name not in _NOT_COMPARED]
    num_rows = num_done = 0
    on_progress("Signing rows", 0, len(indices), "rows")
    for batch in table.batches():
        numbers = text_of_row[num_rows : num_rows + batch.num_rows]
        num_rows += batch.num_rows
        wanted = np.flatnonzero(numbers >= 0)
        if not len(wanted):
            continue
        columns = {name: batch.column(name).take(wanted).to_pylist() for name in names}
        texts = comparable_texts(columns, table.format)
        for start, stop in _blocks(texts):
            signatures[numbers[wanted[start:stop]]] = sign_texts(texts[start:stop])
            num_done += stop - start
            on_progress("Signing rows", num_done, len(indices), "rows")


def _blocks(texts: list[bytes]) -> Iterator[tuple[int, int]]:
    """Cut a list where its texts add up to more bytes than are hashed at once."""
    start = num_bytes = 0
    for index, text in enumerate(texts):
        if num_bytes and num_bytes + len(text) > _BLOCK_BYTES:
            yield start, index
            start, num_bytes = index, 0
        num_bytes += len(text)
    yield start, len(texts)


class _Joiner:
    """Units that grow band by band; the first text of a unit is its root."""

    def __init__(self, signatures: Signatures, similarity: float) -> None:
        num_texts = len(signatures)
        self._signatures = signatures
        self._min_equal = similarity * NUM_SLOTS - 1e-9
        # 32 bits hold 2 billion texts, whose signatures would fill 512 GiB.
        self._parents = np.arange(num_texts, dtype=np.int32)
        self._sizes = np.ones(num_texts, dtype=np.int32)
        self._max_chain = max(_MIN_CHAIN_ROWS, int(num_texts * _MAX_CHAIN_FRACTION))
        self._cut = array("q")
        self._is_cut = np.zeros(num_texts, dtype=bool)

    def units(self) -> Ints:
        """Return the unit of each text."""
        roots = self._roots()
        rank = np.cumsum(roots == np.arange(len(roots))) - 1
        units: Ints = rank[roots]
        return units

    def cut_links(self) -> Ints:
        """Return the links that were not followed and still lie between two units."""
        links = np.array(self._cut, dtype=np.int64).reshape(-1, 2)
        roots = self._roots()
        still_apart: Ints = links[roots[links[:, 0]] != roots[links[:, 1]]]
        return still_apart

    def join_band(self, band: int, band_slots: int) -> None:
        """Compare texts that agree in a band, and join those that are similar."""
        # (texts,)
        hashes = self._band_hashes(band * band_slots, band_slots, None)
        order = np.argsort(hashes, kind="stable").astype(np.int32)
        hashes = hashes[order]
        is_like_next = np.append(hashes[1:] == hashes[:-1], False)
        is_member = is_like_next.copy()
        # A text belongs to a run if it is like the next one or like the one before; all others are done with this band.
        is_member[1:] |= is_like_next[:-1]
        order, is_last = order[is_member], ~is_like_next[is_member]
        del hashes, is_like_next, is_member
        if not len(order):
            return
        # (members,): number of the run that each belongs to
        runs = np.cumsum(is_last) - is_last
        run_sizes = np.bincount(runs)
        if run_sizes.max() > _MAX_DISTANCE + 1:
            # In a long run not everybody meets; what agrees in the next slots too comes side by side.
            is_long = np.flatnonzero(run_sizes[runs] > _MAX_DISTANCE + 1)
            long = order[is_long]
            finer = self._band_hashes((band + 1) * band_slots, band_slots, long)
            order[is_long] = long[np.lexsort((finer, runs[is_long]))]
        # Every text with the one so many positions behind it, as long as both are in one run: a constant number of
        # comparisons a text, where all pairs of a run would grow with its square.
        for distance in range(1, min(_MAX_DISTANCE, int(run_sizes.max()) - 1) + 1):
            is_pair = runs[distance:] == runs[:-distance]
            self._join_similar(order[:-distance][is_pair], order[distance:][is_pair])

    def _band_hashes(self, first_slot: int, band_slots: int, indices: Positions | None) -> npt.NDArray[np.uint64]:
        hashes = np.zeros(len(self._signatures) if indices is None else len(indices), dtype=np.uint64)
        for start in range(0, len(hashes), _CHUNK_PAIRS):
            part = slice(start, start + _CHUNK_PAIRS)
            block = self._signatures[part if indices is None else indices[part]]
            for slot in range(first_slot, first_slot + band_slots):
                hashes[part] = mixed(hashes[part] ^ block[:, slot % NUM_SLOTS].astype(np.uint64))
        return hashes

    def _join_similar(self, left: Positions, right: Positions) -> None:
        """Join the pairs that are similar and not in one unit yet."""
        roots = self._roots()
        is_apart = roots[left] != roots[right]
        left, right = left[is_apart], right[is_apart]
        # Roots are compared first: most pairs of a late band were joined in an early one, and a signature costs 256
        # bytes of reading from disk.
        similar = self._are_similar(left, right)
        left, right = left[similar], right[similar]
        if not len(left):
            return
        one, other = roots[left], roots[right]
        is_long = self._sizes[one] + self._sizes[other] > self._max_chain
        if is_long.any():
            is_chain = is_long.copy()
            is_chain[is_long] = ~self._are_similar(one[is_long], other[is_long])
            for link in zip(left[is_chain].tolist(), right[is_chain].tolist(), strict=True):
                self._note_cut(*link)
            left, right = left[~is_chain], right[~is_chain]
        self._union(left, right)

    def _union(self, left: Positions, right: Positions) -> None:
        # Memory views: a single look-up in them makes no object of numpy's.
        parents, sizes = self._parents.data, self._sizes.data

        def root_of(index: int) -> int:
            while (parent := parents[index]) != index:
                parents[index] = index = parents[parent]
            return index

        for one, other in zip(left.tolist(), right.tolist(), strict=True):
            first, second = root_of(one), root_of(other)
            if first == second:
                continue
            if first > second:
                first, second = second, first
            size = sizes[first] + sizes[second]
            # Looked at again, since units have grown while these pairs were gone through.
            if size > self._max_chain and not self._are_similar(np.array([first]), np.array([second]))[0]:
                self._note_cut(one, other)
                continue
            parents[second] = first
            sizes[first] = size

    def _note_cut(self, one: int, other: int) -> None:
        # One link for each text is enough to say that it has a near duplicate elsewhere; all of them could be as many
        # as pairs.
        if not (self._is_cut[one] and self._is_cut[other]):
            self._is_cut[one] = self._is_cut[other] = True
            self._cut.extend((one, other))

    def _are_similar(self, left: Positions | Ints, right: Positions | Ints) -> Mask:
        similar = np.zeros(len(left), dtype=bool)
        for start in range(0, len(left), _CHUNK_PAIRS):
            part = slice(start, start + _CHUNK_PAIRS)
            equal = self._signatures[left[part]] == self._signatures[right[part]]
            similar[part] = np.count_nonzero(equal, axis=1) >= self._min_equal
        return similar

    def _roots(self) -> Positions:
        """Return the root of each text, and make every way to it one step long."""
        roots = self._parents[self._parents]
        while (roots != self._parents).any():
            self._parents[:] = roots
            roots = roots[roots]
        return roots
