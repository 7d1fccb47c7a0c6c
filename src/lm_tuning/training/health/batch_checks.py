"""Look at tokens and micro-batches of the first step, and prove that a position learns the token after it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from lm_tuning.batching.batch import MicroBatch, StepBatch
from lm_tuning.batching.held_out_loss import evaluating
from lm_tuning.batching.step_loader import StepDataset
from lm_tuning.batching.tasks.base import TrainingTask
from lm_tuning.text.records import TokenRow
from lm_tuning.text.store.table import IGNORE_INDEX
from lm_tuning.training.health.first_loss import ROUNDING_NATS
from lm_tuning.training.health.records import Finding, listing
from lm_tuning.training.health.report import HealthReport
from lm_tuning.training.health.table_checks import check_table, check_tokenizer, step_teaches_nothing
from lm_tuning.training.planning.probe_rows import count_group_positions
from lm_tuning.wording import count_of

# Padding beyond what the rows' lengths ask for, as a share of all positions, that is not worth a word.
PADDING_SLACK = 0.05

# Steps whose cuts are looked at, spread over the run; only lengths are read for it.
_CUTS_CHECKED = 8

# What a position may be made to learn, by the distance of the target.
SHIFTS = {0: "its own token", 1: "the token after it", 2: "the token after the next", -1: "the token before it"}

# Relative difference up to which two losses of the same rows count as the same.
LOSS_TOLERANCE = 0.02


def check_rows(health: HealthReport, model: Any, tokenizer: Any, steps: StepDataset) -> None:
    """Run the checks that need no forward pass, on the token table and on the first step.

    Args:
        health: receives facts and findings; what the table was found to hold before is not said again.
        model: as it will be trained.
        tokenizer: the model's.
        steps: the run's steps.
    """
    if "rows_looked_at" not in health.facts:
        facts, in_table = check_table(steps.table, model, tokenizer, task=steps.task.name)
        health.facts.update(facts)
        health.add_new([*check_tokenizer(tokenizer, model), *in_table])
    health.add_new(check_batch_layout(steps))


@listing
def check_batch_layout(steps: StepDataset) -> Iterator[Finding]:
    """Check how the first step is laid out, and how the run's steps are split.

    Args:
        steps: the run's steps.
    """
    batch, decoder_start_id = steps[0], getattr(steps.task, "decoder_start_id", None)
    yield from check_micro_batches(batch, pad_id=steps.task.pad_id, decoder_start_id=decoder_start_id)
    expected = count_positions(steps, steps.plan.rows_of_step(0))
    yield from check_padding(batch, num_positions_expected=expected, may_pack=_may_pack(steps))
    yield from check_cuts(steps)


def _may_pack(steps: StepDataset) -> bool:
    return steps.task.can_pack and steps.batching != "packed"


def count_positions(steps: StepDataset, rows: Any) -> int:
    """Count the positions that rows need when they are cut as well as their lengths allow.

    It is told from the lengths alone, apart from what splits the steps of a run: rows that are padded lie beside those
    of like length, packed ones one after another, filled up to what the kernels want.

    Args:
        steps: the run's steps.
        rows: indices of the rows of one step.
    """
    # (rows,), longest first: in this order each micro-batch is padded to its first row.
    lengths = np.sort(steps.table.lengths[rows].astype(np.int64))[::-1]
    if steps.task.name == "seq2seq_lm":
        targets = steps.table.num_supervised[rows].astype(np.int64)
        sources = steps.table.lengths[rows].astype(np.int64) - targets
        # Longest first by source and target together, then by source: the last key of lexsort is the first to count.
        order = np.lexsort((-sources, -sources - targets))
        return _count_padded([*zip(sources[order].tolist(), targets[order].tolist(), strict=True)], steps)
    if steps.batching == "packed":
        groups = steps.task.split(steps.table, rows, budget_tokens=steps.micro_batch_tokens, batching="packed")
        # Packed rows are padded at the end of a micro-batch alone, up to what the kernels want.
        multiple = steps.task.packing.position_multiple
        sizes = [int(steps.table.lengths[np.asarray(group)].sum()) for group in groups]
        return sum(-(-size // multiple) * multiple for size in sizes)
    return _count_padded([(length, 0) for length in lengths.tolist()], steps)


def _count_padded(shapes: list[tuple[int, int]], steps: StepDataset) -> int:
    """Count positions of rows in order, each ``(source, target)`` padded to the longest of its micro-batch."""
    positions = num_rows = source = target = 0
    for next_source, next_target in shapes:
        # Encoder and decoder have a grid each, (rows, source) and (rows, target), which are padded apart.
        wider = max(source, next_source), max(target, next_target)
        if num_rows and sum(wider) * (num_rows + 1) > steps.micro_batch_tokens:
            positions += num_rows * (source + target)
            num_rows, wider = 0, (next_source, next_target)
        num_rows += 1
        source, target = wider
    return positions + num_rows * (source + target)


def check_cuts(steps: StepDataset) -> Iterator[Finding]:
    """Compare how some steps of the run are split with the least padding that their rows' lengths allow.

    Args:
        steps: the run's steps; padded ones, since packed rows need no neighbours of like length.
    """
    total = steps.plan.total_steps
    if steps.batching == "packed" or total < 1:
        return
    used = expected = tokens = 0
    for step in sorted({round(index * (total - 1) / (_CUTS_CHECKED - 1)) for index in range(_CUTS_CHECKED)}):
        rows = steps.plan.rows_of_step(step)
        groups = steps.task.split(steps.table, rows, budget_tokens=steps.micro_batch_tokens, batching=steps.batching)
        used += sum(count_group_positions(group, steps.table, steps.task, steps.batching) for group in groups)
        expected += count_positions(steps, rows)
        tokens += int(steps.table.lengths[rows].sum())
    what = "the positions of steps across the run"
    yield from _compare_padding(tokens, used, expected, what, may_pack=_may_pack(steps))


@listing
def check_micro_batches(batch: StepBatch, *, pad_id: int, decoder_start_id: int | None = None) -> Iterator[Finding]:
    """Check that a step teaches something, and that targets and masks are those of its tokens.

    Args:
        batch: a step, on the CPU.
        pad_id: id of the padding.
        decoder_start_id: what an encoder-decoder's targets start from; ``None`` for other models.
    """
    if batch.num_supervised == 0:
        yield step_teaches_nothing(step=batch.step + 1, num_tokens=batch.num_tokens)
    shifted = check_targets(batch, decoder_start_id=decoder_start_id)
    if shifted is not None:
        yield shifted
    for index, micro_batch in enumerate(batch.micro_batches):
        fault = _find_mask_fault(micro_batch, pad_id)
        if fault is not None:
            yield Finding(
                code="mask-not-padding",
                measured=f"in micro-batch {index + 1} of step {batch.step + 1} {fault}",
                expected="1 for every token of a row, 0 for the padding after them",
                cause="The model would read padding, or miss tokens.",
                change="Look at what lays the micro-batches out; the parameters do not decide it.",
            )
            break


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


def _find_mask_fault(batch: MicroBatch, pad_id: int) -> str | None:
    # (rows, positions)
    ids = batch.input_ids.numpy()
    # Of an encoder-decoder, the mask is the encoder's: what the decoder reads does not count against it.
    decoded = 0 if batch.decoder_input_ids is None else int((batch.targets.numpy() != IGNORE_INDEX).sum())
    num_read = batch.num_tokens - decoded
    if batch.attention_mask is None:
        if batch.decoder_input_ids is not None and ids.size != num_read:
            return f"an encoder reads {ids.size - num_read} padded positions, since there is no mask"
        return None
    # (rows, positions), and the real tokens by row, (rows,)
    mask = batch.attention_mask.numpy() != 0
    counts = mask.sum(axis=1)
    if counts.min() == 0:
        return f"the mask hides all of row {int(counts.argmin()) + 1}"
    # Right-padded: a row of the mask is ones and then zeros, so its sum tells the whole row.
    if (mask != (np.arange(mask.shape[1])[None] < counts[:, None])).any():
        return "the mask has holes, or hides the beginning of rows"
    if counts.sum() != num_read:
        return f"the mask shows {count_of(int(counts.sum()), 'position')} of {count_of(num_read, 'real token')}"
    if (ids[~mask] != pad_id).any():
        return "the mask hides something that is not padding"
    return None


@listing
def check_padding(batch: StepBatch, *, num_positions_expected: int, may_pack: bool = True) -> Iterator[Finding]:
    """Compare a step's padding with the least that its micro-batches need.

    Args:
        batch: a step.
        num_positions_expected: positions that the same groups of rows take when padded to the longest row of each.
        may_pack: whether packing the rows is another way.
    """
    what = "the first step's positions"
    yield from _compare_padding(batch.num_tokens, batch.num_positions, num_positions_expected, what, may_pack=may_pack)


def _compare_padding(
    num_tokens: int, num_positions: int, num_positions_expected: int, what: str, *, may_pack: bool
) -> Iterator[Finding]:
    share, expected = (1 - num_tokens / max(positions, 1) for positions in (num_positions, num_positions_expected))
    if share <= expected + PADDING_SLACK:
        return
    yield Finding(
        code="padding-above-plan",
        measured=f"{share:.1%} of {what} are padding",
        expected=f"{expected:.1%}, with rows of like length together",
        cause="Rows are padded to a fixed length, or are not grouped by length.",
        change=f"Look at what lays the micro-batches out{', or set train.batching=packed' if may_pack else ''}.",
    )


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
