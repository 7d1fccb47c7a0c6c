"""Micro-batches of one fixed shape: what a recorded step reads, always at the same addresses.

A recorded step knows the sizes of its tensors for good. So micro-batches are filled up to few sizes: positions and rows
from which nothing is learned, which changes neither the loss nor any gradient. How many of them are real stands in the
tensors alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from lm_tuning.batching.batch import MicroBatch
from lm_tuning.text.store.table import IGNORE_INDEX

# Multiples that sizes are rounded up to at least: the tiles of matrix products, and where rows are few or short.
_LEAST_PACKED = 128
_LEAST_ROWS = 4
_LEAST_WIDTH = 8
_LEAST_KEPT = 32
_LEAST_BOUNDS = 16
# Bounds of the longest row: attention runs blocks of 128 positions, whatever is below.
_LEAST_LONGEST = 128


@dataclass(frozen=True)
class StaticShape:
    """Sizes of a micro-batch.

    Attributes:
        rows: of the grid of token ids; 1 where rows are packed.
        width: positions of a row of the grid.
        kept: positions whose logits are made.
        target_rows: rows of the targets; 0 for a classifier, whose targets are ``(kept,)``.
        bounds: entries of the bounds of packed rows; 0 for padded rows.
        longest: bound of the packed rows' lengths, in tokens; 0 for padded rows.
    """

    rows: int
    width: int
    kept: int
    target_rows: int
    bounds: int = 0
    longest: int = 0

    @property
    def num_positions(self) -> int:
        """Positions that the model computes."""
        return self.rows * self.width

    def covers(self, other: StaticShape) -> bool:
        """Return whether a micro-batch of another shape can be filled up to this one."""
        return (self.bounds > 0) == (other.bounds > 0) and all(
            getattr(self, field.name) >= getattr(other, field.name) for field in fields(self)
        )


def why_not(batch: MicroBatch) -> str | None:
    """Describe why a micro-batch cannot be filled up; ``None`` where it can.

    Args:
        batch: of any task.

    Returns:
        The end of a sentence that begins with "since".
    """
    if batch.decoder_input_ids is not None or batch.attention_mask is not None:
        return "rows of an encoder-decoder go with a mask"
    if batch.position_ids is not None and batch.row_bounds is None:
        return "packed rows are kept apart by a mask"
    return None


def static_shape(batch: MicroBatch) -> StaticShape:
    """Return the sizes that a micro-batch is filled up to.

    Args:
        batch: for which :func:`why_not` finds nothing.
    """
    rows, width = batch.input_ids.shape
    is_classifier = batch.targets.ndim == 1
    kept = _round_up(len(batch.kept_positions), _LEAST_KEPT)
    if batch.row_bounds is None:
        rows = _round_up(rows, _LEAST_ROWS)
        width = _round_up(width, _LEAST_WIDTH)
        return StaticShape(rows, width, kept, 0 if is_classifier else rows)
    assert batch.longest_row_tokens is not None
    filled = _round_up(width, _LEAST_PACKED)
    longest = max(batch.longest_row_tokens, _LEAST_LONGEST)
    num_bounds = _count_bounds(batch, filled, longest)
    # To powers of two: an empty row costs next to nothing, another shape a recording.
    num_bounds = max(1 << (num_bounds - 1).bit_length(), _LEAST_BOUNDS)
    return StaticShape(1, filled, kept, 0 if is_classifier else 1, num_bounds, longest)


class StaticBatch:
    """A micro-batch whose tensors stay where they are.

    All of them are views of one buffer, so that a step is copied to the device at once.

    Attributes:
        shape: of the tensors.
        batch: what the model is given.
        total: what the step's summed loss is divided by, a scalar on the device.
    """

    def __init__(self, shape: StaticShape, sample: MicroBatch, *, device: torch.device | str, pad_id: int) -> None:
        """Make the buffer.

        Args:
            shape: of the tensors.
            sample: any micro-batch that the shape covers.
            device: where the model is.
            pad_id: PAD, at all positions that are added.
        """
        self.shape = shape
        self._pad_id = pad_id
        self._device = torch.device(device)
        # int32 bounds lie two by two in the int64 buffer.
        sizes = {
            "total": 1,
            "input_ids": shape.num_positions,
            "position_ids": shape.num_positions if shape.bounds else 0,
            "kept_positions": shape.kept,
            "targets": shape.kept * max(shape.target_rows, 1),
            "row_bounds": -(-shape.bounds // 2),
        }
        ends = np.cumsum(list(sizes.values()))
        self._slices = {
            name: slice(int(end) - size, int(end)) for (name, size), end in zip(sizes.items(), ends, strict=True)
        }
        self._buffer = torch.zeros(int(ends[-1]), dtype=torch.int64, device=self._device)
        parts = {name: self._buffer[where] for name, where in self._slices.items()}
        grid = (shape.rows, shape.width)
        self.total = parts["total"][0]
        packed: dict[str, Any] = {"position_ids": None}
        if shape.bounds:
            packed = {
                "position_ids": parts["position_ids"].view(grid),
                "row_bounds": parts["row_bounds"].view(torch.int32)[: shape.bounds],
                "longest_row_tokens": shape.longest,
            }
        targets = parts["targets"]
        self.batch = MicroBatch(
            input_ids=parts["input_ids"].view(grid),
            kept_positions=parts["kept_positions"],
            targets=targets.view(shape.target_rows, shape.kept) if shape.target_rows else targets,
            num_supervised=sample.num_supervised,
            num_tokens=sample.num_tokens,
            num_rows=sample.num_rows,
            **packed,
        )

    def fill(self, batch: MicroBatch, total: int) -> None:
        """Copy a micro-batch in, without waiting for the copy.

        Args:
            batch: on the host, of a shape that this one covers.
            total: what the step's summed loss is divided by.
        """
        # Page-locked memory alone is copied from without waiting. Its allocator gives it to nobody else before the copy
        # has been made, so that a fresh one per step is safe, and costs nothing once the first ones are there.
        host = torch.empty(len(self._buffer), dtype=torch.int64, pin_memory=self._device.type == "cuda")
        into = host.numpy()
        parts = {name: into[where] for name, where in self._slices.items()}
        parts["total"][0] = total
        self._fill_inputs(parts, batch)
        self._fill_targets(parts, batch)
        self._buffer.copy_(host, non_blocking=True)

    def _fill_inputs(self, parts: dict[str, Any], batch: MicroBatch) -> None:
        shape = self.shape
        grid = parts["input_ids"].reshape(shape.rows, shape.width)  # (rows, width), a view
        rows, width = batch.input_ids.shape
        grid.fill(self._pad_id)
        grid[:rows, :width] = batch.input_ids.numpy()
        if batch.row_bounds is None or batch.position_ids is None:
            return
        # What fills up is rows too, none longer than the longest: their positions begin at 0.
        parts["position_ids"][:width] = batch.position_ids[0].numpy()
        parts["position_ids"][width:] = np.arange(shape.width - width) % shape.longest
        bounds = parts["row_bounds"].view(np.int32)[: shape.bounds]
        known = len(batch.row_bounds)
        assert shape.bounds >= _count_bounds(batch, shape.width, shape.longest), (
            "a row would be longer than the longest"
        )
        bounds[:known] = batch.row_bounds.numpy()
        # Behind the last position are rows without any.
        bounds[known:] = np.minimum(width + shape.longest * np.arange(1, shape.bounds - known + 1), shape.width)

    def _fill_targets(self, parts: dict[str, Any], batch: MicroBatch) -> None:
        shape = self.shape
        kept, num_kept = batch.kept_positions.numpy(), len(batch.kept_positions)
        if shape.target_rows == 0:
            # Of a classifier: positions in the flattened grid, whose rows are wider now.
            width = batch.input_ids.shape[1]
            kept = kept // width * shape.width + kept % width
        # Position 0 is always there, and learns nothing from an ignored target.
        parts["kept_positions"][:num_kept], parts["kept_positions"][num_kept:] = kept, 0
        parts["targets"].fill(IGNORE_INDEX)
        targets = batch.targets.numpy()
        if targets.ndim == 1:
            parts["targets"][:num_kept] = targets
        else:
            parts["targets"].reshape(shape.target_rows, shape.kept)[: len(targets), :num_kept] = targets


def find_covering(shapes: Iterable[StaticShape], batch: MicroBatch) -> StaticShape | None:
    """Return the smallest shape that a micro-batch can be filled up to without computing a quarter more.

    Args:
        shapes: to choose among.
        batch: for which :func:`why_not` finds nothing.

    Returns:
        ``None`` where there is none.
    """
    needed = static_shape(batch)
    fitting = [
        shape
        for shape in shapes
        if shape.covers(needed)
        and 4 * shape.num_positions <= 5 * needed.num_positions
        and shape.kept <= 2 * needed.kept
        and shape.bounds >= _count_bounds(batch, shape.width, shape.longest)
    ]
    return min(fitting, key=lambda shape: (shape.num_positions, shape.kept), default=None)


def _count_bounds(batch: MicroBatch, filled: int, longest: int) -> int:
    """Return the bounds of packed rows filled up to a number of positions by rows of at most ``longest`` tokens."""
    if batch.row_bounds is None:
        return 0
    return len(batch.row_bounds) + -(-(filled - batch.input_ids.shape[1]) // longest)


def _round_up(number: int, least: int) -> int:
    """Round up to a multiple of ``least`` and of an eighth of the power of two below, so that few sizes come up."""
    multiple = max(least, 1 << max(number.bit_length() - 4, 0))
    return -(-number // multiple) * multiple
