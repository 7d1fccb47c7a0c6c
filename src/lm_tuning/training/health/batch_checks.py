"""Look at tokens, micro-batches, logits and gradients around the first step: each check names what it finds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_tuning.text.store.table import IGNORE_INDEX
from lm_tuning.training.health.alignment import check_targets
from lm_tuning.training.health.records import SHOWN_NAMES, Finding, listing
from lm_tuning.training.health.report import HealthReport
from lm_tuning.training.health.table_checks import check_table, check_tokenizer, step_teaches_nothing
from lm_tuning.wording import count_of, name_first

if TYPE_CHECKING:
    import torch

    from lm_tuning.batching.batch import MicroBatch, StepBatch
    from lm_tuning.batching.step_loader import StepDataset

# Padding beyond what the rows' lengths ask for, as a share of all positions, that is not worth a word.
PADDING_SLACK = 0.05

# Standard deviation of a position's logits; language models have 1 to 5.
LARGEST_SPREAD = 30.0

# In 16 bits, numbers above it are rounded by half a nat or more.
LARGEST_LOGIT = {"float32": 1e4, "bfloat16": 1e3, "float16": 1e3}

# Steps whose cuts are looked at, spread over the run; only lengths are read for it.
_CUTS_CHECKED = 8


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
        sizes = [int(steps.table.lengths[np.asarray(group)].sum()) for group in groups]
        return sum(
            -(-size // steps.task.packing.position_multiple) * steps.task.packing.position_multiple for size in sizes
        )
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
        used += sum(_count_group(steps, np.asarray(group)) for group in groups)
        expected += count_positions(steps, rows)
        tokens += int(steps.table.lengths[rows].sum())
    what = "the positions of steps across the run"
    yield from _compare_padding(tokens, used, expected, what, may_pack=_may_pack(steps))


def _count_group(steps: StepDataset, rows: Any) -> int:
    """Count the positions of one padded micro-batch."""
    lengths = steps.table.lengths[rows].astype(np.int64)
    if steps.task.name != "seq2seq_lm":
        return len(rows) * int(lengths.max())
    targets = steps.table.num_supervised[rows]
    return len(rows) * int((lengths - targets).max() + targets.max())


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


@listing
def check_logits(
    logits: Mapping[str, float], *, dtype: str = "float32", has_fresh_head: bool = False
) -> Iterator[Finding]:
    """Compare the logits before step 1 with what sound models have.

    Args:
        logits: ``mean``, ``variance_over_classes`` (of one position, mean over positions), ``min`` and ``max``.
        dtype: they were computed in.
        has_fresh_head: whether the head is new, which may start with equal logits.
    """
    spread = math.sqrt(max(logits["variance_over_classes"], 0.0))
    summary = f"logits have a mean of {logits['mean']:.4g}, a spread of {spread:.4g} and lie between "
    summary += f"{logits['min']:.4g} and {logits['max']:.4g} ({dtype})"
    limit = LARGEST_LOGIT.get(dtype, 1e4)
    # A model may rule tokens out with minus infinity, so only finite values are measured.
    largest = max((abs(value) for value in (logits["min"], logits["max"]) if math.isfinite(value)), default=0.0)
    if math.isnan(logits["mean"]) or logits["max"] == math.inf:
        yield Finding(
            code="logits-not-finite",
            measured=summary,
            expected="numbers",
            cause="The weights hold NaN, or the forward pass overflows.",
            change="Look at model.name_or_path, and set train.precision=bfloat16 or float32.",
        )
    elif largest > limit or (math.isfinite(spread) and spread > LARGEST_SPREAD):
        yield Finding(
            code="logits-out-of-range",
            measured=summary,
            expected=f"a spread of at most {LARGEST_SPREAD:g} and values within ±{limit:g}",
            cause="The weights are broken or were scaled, or the head does not belong to the backbone.",
            change="Look at model.name_or_path, and set train.precision=float32 to tell rounding from weights.",
        )
    elif spread == 0 and not has_fresh_head:
        yield Finding(
            code="logits-flat",
            measured=summary,
            expected="logits that differ",
            cause="The head's weights are all zero, as when a checkpoint's head was not loaded.",
            change="Look at model.name_or_path.",
        )


def expected_fresh_head_loss(logits: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[float, float]:
    """Describe at what loss a head of random weights starts.

    Its logits have nothing to do with the labels, so a row loses ``logsumexp(z) - z_y`` with a random y: log of the
    classes plus half the variance of z over the classes. Their scatter is the spread of z, over the root of the rows.
    Rows of one class scatter together where a backbone gives all rows nearly the same state; the band then goes by
    how the labels are spread, if they are given.

    Args:
        logits: ``(rows, classes)``.
        labels: class of each row, ``(rows,)``.

    Returns:
        The expected loss in nats per row, and four standard deviations of it.
    """
    import torch

    num_rows, num_classes = logits.shape
    # (rows, classes) -> (rows,) -> the mean; of all classes, not of a sample of them, hence without Bessel's
    # correction.
    variance = float(logits.detach().float().var(dim=-1, correction=0).mean())
    # Independent rows: the variance of their mean is one over their number.
    share = 1 / num_rows
    if labels is not None:
        counts = torch.bincount(labels.flatten(), minlength=num_classes).double()
        # Sum of squared shares of the classes: 1 over the number of classes that the rows are evenly of, 1 for one
        # class.
        share = max(share, float((counts / num_rows).square().sum()))
    return math.log(num_classes) + variance / 2, 4 * math.sqrt(variance * share)


@listing
def check_gradients(model: torch.nn.Module) -> Iterator[Finding]:
    """Check after a backward pass, before the weights change, that what is trained has a gradient and nothing else.

    A gradient of zeros is fine: an adapter's first matrix has one as long as its second is zero.

    Args:
        model: after the backward pass of step 1.
    """
    missing, frozen, num_trained = [], [], 0
    for name, parameter in model.named_parameters():
        # None, not zeros: a gradient that is all zeros was reached by the backward pass.
        if parameter.requires_grad:
            num_trained += 1
            if parameter.grad is None:
                missing.append(name)
        elif parameter.grad is not None:
            frozen.append(name)
    if len(missing) == num_trained:
        yield Finding(
            code="nothing-has-gradient",
            measured=f"none of {num_trained} trained parameters has a gradient after the first backward pass",
            expected="a gradient for each",
            cause="The loss does not reach them: everything is frozen, or the graph is cut, as activation "
            "checkpointing does when no input asks for a gradient.",
            change="Look at train.freeze and train.lora.target_modules, and try train.gradient_checkpointing=false.",
        )
    elif missing:
        yield Finding(
            code="parameter-without-gradient",
            measured=f"{len(missing)} of {count_of(num_trained, 'trained parameter')} "
            f"{'has' if len(missing) == 1 else 'have'} no gradient: {name_first(missing, SHOWN_NAMES)}",
            expected="a gradient for each",
            cause="The forward pass does not use them, so they stay as they are.",
            change="Name them in train.freeze, or leave them out of train.lora.target_modules.",
        )
    if frozen:
        yield Finding(
            code="frozen-parameter-has-gradient",
            measured=f"{count_of(len(frozen), 'frozen parameter')} {'has' if len(frozen) == 1 else 'have'} a gradient: "
            f"{name_first(frozen, SHOWN_NAMES)}",
            expected="none, which would cost memory and count in the gradient norm",
            cause="They were frozen after a backward pass, or a custom backward pass writes to them.",
            change="Freeze through train.freeze or train.method alone.",
        )
