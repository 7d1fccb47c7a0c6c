"""Prove that a position learns the token after it: by the targets of a batch, and by the losses of other alignments."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from lm_tuning.batching.held_out_loss import evaluating
from lm_tuning.text.store.table import IGNORE_INDEX
from lm_tuning.training.health.records import Finding
from lm_tuning.training.health.report import ROUNDING_NATS

if TYPE_CHECKING:
    from lm_tuning.batching.batch import MicroBatch, StepBatch
    from lm_tuning.batching.tasks.base import TrainingTask
    from lm_tuning.text.records import TokenRow

# What a position may be made to learn, by the distance of the target.
SHIFTS = {0: "its own token", 1: "the token after it", 2: "the token after the next", -1: "the token before it"}

# Relative difference up to which two losses of the same rows count as the same.
LOSS_TOLERANCE = 0.02


def check_targets(batch: StepBatch, *, decoder_start_id: int | None = None) -> Finding | None:
    """Check by the ids alone that each target is the token after its position; for a classifier there is nothing to.

    Args:
        batch: a step, on the CPU.
        decoder_start_id: what an encoder-decoder's targets start from; ``None`` for other models.
    """
    counts: dict[int, int] = dict.fromkeys(SHIFTS, 0)
    total = 0
    for micro_batch in batch.micro_batches:
        # (rows, kept positions) of a language model, (rows,) of a classifier, which has no neighbours to be shifted to.
        if micro_batch.targets.dim() != 2:
            return None
        size, right = _count_shifts(micro_batch, decoder_start_id)
        total += size
        for shift, count in right.items():
            counts[shift] += count
    if total == 0 or counts[1] == total:
        return None
    shares = ", ".join(f"{SHIFTS[shift]} in {count / total:.1%}" for shift, count in counts.items() if count)
    # Equal tokens side by side are right at several distances, so the shares may add up to more than one.
    likely = max(counts, key=lambda shift: counts[shift])
    return Finding(
        code="labels-shifted",
        measured=f"of the {total} targets of step {batch.step + 1}, a position learns {shares or 'no token near it'}",
        expected=f"{SHIFTS[1]} in 100.0%",
        cause=f"Labels and positions are off by {abs(likely - 1)}."
        if likely != 1 and counts[likely] > total // 2
        else "Some labels are of other tokens than the rows hold.",
        change="Look at what lays the micro-batches out: labels are shifted once, there.",
    )


def _count_shifts(batch: MicroBatch, decoder_start_id: int | None) -> tuple[int, dict[int, int]]:
    """Count the targets of a micro-batch, and of how many the id at each distance is the target."""
    targets = batch.targets
    is_target = targets != IGNORE_INDEX
    if batch.decoder_input_ids is not None:
        # A decoder reads its targets one position later, from the start token on.
        read = batch.decoder_input_ids
        starts = bool((read[:, 0] == decoder_start_id).all()) if decoder_start_id is not None else True
        # (rows, target - 1) each: what is read at a position is the target of the one before.
        same = read[:, 1:] == targets[:, :-1]
        counted = is_target[:, 1:]
        right = int((same & counted).sum()) + (int(is_target[:, 0].sum()) if starts else 0)
        # A decoder that reads its own targets copies them, and its loss falls to next to nothing.
        own = int(((read == targets) & is_target).sum())
        return int(is_target.sum()), {1: right, 0: own}
    ids, positions = batch.input_ids, batch.kept_positions
    counts = {}
    for shift in SHIFTS:
        # (kept positions,): the micro-batch keeps the hidden states of these alone, for all of its rows.
        there = positions + shift
        inside = (there >= 0) & (there < ids.shape[1])
        # (rows, kept positions); what lies outside is clamped into the row and left out by the mask.
        found = ids[:, there.clamp(0, ids.shape[1] - 1)]
        counts[shift] = int(((found == targets) & is_target & inside).sum())
    return int(is_target.sum()), counts


def check_alignment(
    task: TrainingTask, model: Any, row: TokenRow, measured: float, *, device: torch.device | str
) -> tuple[dict[str, float], Finding | None]:
    """Measure a row at each alignment, from its ids and spans alone, and compare with what is trained on.

    Args:
        task: a causal language model's; what others learn has no neighbours.
        model: of the task; it is left in its mode.
        row: of the first step.
        measured: its loss as it is trained on, in nats per supervised token.
        device: where the model is.

    Returns:
        Nats per token by alignment (none for other tasks), and a finding if what is trained on is another than the
        token after each position.
    """
    if task.name != "causal_lm" or not row.spans:
        return {}, None
    losses: dict[int, float] = {}
    with evaluating(model):
        ids = torch.as_tensor(row.input_ids.astype("int64"), device=device)
        logits = model(input_ids=ids[None], use_cache=False).logits[0]  # (tokens, vocabulary)
        # (supervised,): indices of the tokens to be predicted; the logits that predict them stand one earlier.
        supervised = torch.cat([torch.arange(start, end, device=device) for start, end in row.spans])
        for shift in SHIFTS:
            # The prediction of the token at t, made ``shift`` positions before it.
            at = supervised[(supervised - shift >= 0) & (supervised - shift < len(ids))]
            if len(at):
                losses[shift] = float(torch.nn.functional.cross_entropy(logits[at - shift].float(), ids[at]))
    facts = {f"distance {shift}": loss for shift, loss in losses.items()}
    if 1 not in losses or not math.isfinite(measured) or _is_close(measured, losses[1]):
        return facts, None
    nearest = min(losses, key=lambda shift: abs(losses[shift] - measured))
    if not _is_close(measured, losses[nearest]):
        return facts, None  # another difference, which other checks name
    return facts, Finding(
        code="labels-shifted",
        measured=f"row {row.row_id} has {measured:.4f} nats per token as it is trained on, the loss of predicting "
        f"{SHIFTS[nearest]} ({losses[nearest]:.4f})",
        expected=f"{losses[1]:.4f}, that of predicting {SHIFTS[1]}",
        cause=f"Labels and positions are off by {abs(nearest - 1)}.",
        change="Look at what makes the targets: labels are shifted once, where micro-batches are laid out.",
    )


def _is_close(first: float, second: float) -> bool:
    return math.isclose(first, second, rel_tol=LOSS_TOLERANCE, abs_tol=ROUNDING_NATS)
