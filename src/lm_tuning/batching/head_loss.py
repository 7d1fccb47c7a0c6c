"""How the loss of a language model's head is made: chosen by a try on the model itself, which also proves it right."""

from __future__ import annotations

import importlib.util
import logging
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import cross_entropy, linear

from lm_tuning.batching.losses import Implementation, compiled_kernel, linear_sum_nats, sum_nats_in_chunks
from lm_tuning.models.structure import backbone_of, inner_model
from lm_tuning.text.store.table import IGNORE_INDEX

logger = logging.getLogger(__name__)

PARITY = 2e-3
"""Relative difference of loss from plain cross-entropy up to which an implementation counts as right in 16 bits."""
GRADIENT_PARITY = 3e-2
_TRIED_POSITIONS = 4096
# The others count the targets on the host, for which they wait for the device.
_RECORDABLE = ("PyTorch", "PyTorch compiled", "Triton")
# What compiling a kernel for the head takes, importing the compiler included, and what it saves of each logit: 3.6 ms
# for 4,096 positions and a vocabulary of 49,152 tokens on an H200, 15.4 ms for one of 151,936 on an H100.
_KERNEL_SECONDS = 6.0
_SAVED_PER_LOGIT = 2.5e-11
_SAME_LOGITS = {torch.float32: 1e-4}
_SAME_LOGITS_16_BITS = 5e-2
_ROUNDS = 3
_REFERENCE_POSITIONS = 512


@dataclass(frozen=True)
class HeadLoss:
    """The loss of a head over hidden states.

    Attributes:
        head: the model's output layer.
        name: what makes the loss, for reports.
        implementation: for a plain linear head; ``None`` runs the head itself, in chunks.
        compute_dtype: type of the head's products.
        recordable: the fastest implementation that never asks the device for a number, so that it can be recorded in a
            CUDA graph; ``None`` where that is ``implementation`` itself.
    """

    head: Any
    name: str
    implementation: Implementation | None
    compute_dtype: torch.dtype
    recordable: Implementation | None = None

    def for_recording(self) -> HeadLoss:
        """Return the same loss made by what can be recorded in a CUDA graph."""
        return self if self.recordable is None else replace(self, implementation=self.recordable)

    def __call__(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        *,
        label_smoothing: float,
        hits: torch.Tensor | None = None,
        each: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sum the loss.

        Args:
            hidden: ``(positions, features)``.
            targets: ``(positions,)``, ``IGNORE_INDEX`` for none.
            label_smoothing: share of the target that is spread over the vocabulary.
            hits: receives what :func:`lm_tuning.batching.losses.count_hits` counts; only without gradient.
            each: receives what :func:`lm_tuning.batching.losses.judge_targets` says; likewise.

        Returns:
            A scalar in nats, float32.
        """
        options: Any = {"label_smoothing": label_smoothing, "vocabulary": self.head.out_features}
        options |= {"hits": hits, "each": each}
        if self.implementation is None:
            return sum_nats_in_chunks(lambda rows: self.head(rows).float(), hidden, targets, **options)
        weight, bias = self.head.weight, self.head.bias  # (vocabulary, features), (vocabulary,) or none
        if torch.is_grad_enabled():
            assert hits is None and each is None, "training counts no hits"
            return self.implementation(hidden, weight, bias, targets, label_smoothing)
        # The implementations make gradients on the way, which nobody wants here.
        dtype = self.compute_dtype
        with torch.autocast(hidden.device.type, enabled=False):
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
            return sum_nats_in_chunks(
                lambda rows: linear(rows.to(dtype), weight, bias),
                hidden,
                targets,
                bytes_per_logit=dtype.itemsize,
                **options,
            )


def choose_head_loss(
    model: Any,
    row: Any,
    *,
    device: str,
    compute_dtype: str,
    label_smoothing: float = 0.0,
    num_positions: float = math.inf,
) -> tuple[HeadLoss | None, str]:
    """Choose what makes the loss of a language model's head.

    First the head is applied to the hidden states of a row: some models scale or bound their logits afterwards, and
    theirs are left alone. Then every implementation that is there is compared with plain cross-entropy in float32, loss
    and gradient, and the fastest of the right ones is taken. PyTorch's own is the only one on a CPU, and in a run that
    would end before another one is ready.

    Args:
        model: a language model with a decoder, in training or not.
        row: token ids of one row, ``(tokens,)``.
        device: ``cpu``, ``cuda`` or ``mps``.
        compute_dtype: type of the products.
        label_smoothing: as in training.
        num_positions: supervised positions of the whole run.

    Returns:
        The choice, ``None`` when all logits must be made at once, and the reason in words.
    """
    inner = inner_model(model)
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if head is None or not hasattr(head, "out_features"):
        return None, f"all logits at once, since {type(inner).__name__} has no linear head of its own"
    was_training = model.training
    model.eval()
    with torch.no_grad():
        # (1, tokens)
        inputs = {"input_ids": torch.as_tensor(row, dtype=torch.int64, device=device)[None], "use_cache": False}
        hidden = backbone_of(model)(**inputs).last_hidden_state
        # Both (1, tokens, vocabulary). One row tells: scaling, bounding or shifting logits changes every position.
        ours, theirs = head(hidden).float(), inner(**inputs).logits.float()
    model.train(was_training)
    # Relative to the largest logit: absolute ones differ by a factor of a hundred between families.
    difference = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6))
    if difference > _SAME_LOGITS.get(hidden.dtype, _SAME_LOGITS_16_BITS):
        return None, (
            f"all logits at once, since {type(inner).__name__} changes them after its head "
            f"(by up to {difference:.1%} of the largest)"
        )
    dtype = getattr(torch, compute_dtype)
    # A quantized or adapted head is a subclass, or wraps one: its weight is not what it multiplies with.
    if type(head) is not torch.nn.Linear:
        return HeadLoss(head, "head in chunks", None, dtype), f"in chunks through {type(head).__name__}"
    candidates = _candidates(head, dtype, device, label_smoothing)
    if len(candidates) == 1:
        [(name, implementation)] = candidates.items()
        return HeadLoss(head, name, implementation, dtype), f"{name}, in chunks of positions"
    saved = _SAVED_PER_LOGIT * num_positions * head.weight.shape[0]
    if saved < _KERNEL_SECONDS:
        [name, *_] = candidates
        gain = f"a faster one would save {saved:.1f} s and take {_KERNEL_SECONDS:.0f} s to make ready"
        return HeadLoss(head, name, candidates[name], dtype), f"{name}, in chunks, since {gain}"
    seconds, tried = _try_all(candidates, head, hidden[0], label_smoothing=label_smoothing)
    name, recordable = (_fastest(seconds, among) for among in (candidates, _RECORDABLE))
    other = None if name == recordable else candidates[recordable]
    return HeadLoss(head, name, candidates[name], dtype, other), f"{name}, of {tried}"


def _candidates(head: Any, dtype: torch.dtype, device: str, label_smoothing: float) -> dict[str, Implementation]:
    """Return what can make the loss here, the plain one first."""
    found = {"PyTorch": linear_sum_nats(dtype)}
    if device != "cuda":
        return found
    found["PyTorch compiled"] = linear_sum_nats(dtype, compiled_kernel)
    if importlib.util.find_spec("triton") is not None:
        from lm_tuning.batching.row_kernel import row_kernel

        found["Triton"] = linear_sum_nats(dtype, row_kernel, is_in_place=True)
    if importlib.util.find_spec("liger_kernel") is not None:
        found["Liger"] = _liger(dtype)
    # It makes the logits twice, which pays where the head is frozen and the gradient of its weight is not wanted.
    if (
        importlib.util.find_spec("cut_cross_entropy") is not None
        and not head.weight.requires_grad
        and dtype in {torch.bfloat16, torch.float16}
        and head.bias is None
        and not label_smoothing
    ):
        found["cut cross-entropy"] = _cut_cross_entropy(dtype)
    return found


def _liger(dtype: torch.dtype) -> Implementation:
    def liger(hidden: Any, weight: Any, bias: Any, targets: Any, smoothing: float) -> torch.Tensor:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Fused

        bias = None if bias is None else bias.to(dtype)
        result: Any = Fused.apply(
            hidden.to(dtype), weight.to(dtype), targets, bias, None, IGNORE_INDEX, 0.0, smoothing, "sum"
        )
        return (result[0] if isinstance(result, tuple) else result).float()  # type: ignore[no-any-return]

    return liger


def _cut_cross_entropy(dtype: torch.dtype) -> Implementation:
    def cut(hidden: Any, weight: Any, bias: Any, targets: Any, smoothing: float) -> torch.Tensor:
        from cut_cross_entropy import linear_cross_entropy

        assert bias is None and not smoothing, "it knows neither, and is no candidate then"
        nats: torch.Tensor = linear_cross_entropy(
            hidden.to(dtype), weight.to(dtype), targets, ignore_index=IGNORE_INDEX, reduction="sum"
        )
        return nats.float()

    return cut


def _try_all(
    candidates: dict[str, Implementation], head: Any, hidden: torch.Tensor, *, label_smoothing: float
) -> tuple[dict[str, float], str]:
    """Time every candidate on as many positions as a micro-batch may have; return the right ones, and what was seen."""
    # The row is short; kernels are compared at a size at which they would be used. (tokens, features), repeated.
    repeats = -(-_TRIED_POSITIONS // len(hidden))
    hidden = hidden.detach().repeat(repeats, 1)[:_TRIED_POSITIONS]
    generator = torch.Generator(device=hidden.device).manual_seed(0)
    targets = torch.randint(
        head.weight.shape[0], (len(hidden),), device=hidden.device, generator=generator, dtype=torch.int64
    )
    # Ignored positions are part of what an implementation has to get right.
    targets[::7] = IGNORE_INDEX
    wanted_nats, wanted_gradient = _reference(head, hidden, targets, label_smoothing)
    seconds: dict[str, float] = {}
    said = []
    for name, candidate in candidates.items():
        try:
            nats, gradient, took = _time(candidate, head, hidden, targets, label_smoothing)
        # Whatever a foreign kernel raises on this card, another one does the work.
        except Exception as error:
            said.append(f"{name} failed ({type(error).__name__})")
            continue
        off = abs(nats - wanted_nats) / abs(wanted_nats)
        gradient_off = float((gradient - wanted_gradient).norm() / wanted_gradient.norm())
        if off > PARITY or gradient_off > GRADIENT_PARITY:
            said.append(f"{name} is off by {off:.1e} (gradient {gradient_off:.1e})")
        else:
            seconds[name] = took
            said.append(f"{name} {1000 * took:.1f} ms")
    return seconds, f"{', '.join(said)} for {len(hidden)} positions"


def _fastest(seconds: dict[str, float], among: Iterable[str]) -> str:
    """Name the fastest of some candidates; the first one, PyTorch's own functions, where none was right."""
    names = [*among]
    return min((name for name in names if name in seconds), key=seconds.__getitem__, default=names[0])


def _reference(head: Any, hidden: torch.Tensor, targets: torch.Tensor, smoothing: float) -> tuple[float, torch.Tensor]:
    """Return the loss and the hidden states' gradient in float32, a few positions at a time."""
    nats, gradients = 0.0, []
    weight = head.weight.detach().float()
    bias = None if head.bias is None else head.bias.detach().float()
    for start in range(0, len(hidden), _REFERENCE_POSITIONS):
        part = slice(start, start + _REFERENCE_POSITIONS)
        # float32 throughout: autocast around this call would round what the others are compared with.
        with torch.enable_grad(), torch.autocast(hidden.device.type, enabled=False):
            leaf = hidden[part].float().requires_grad_()
            logits = linear(leaf, weight, bias)
            loss = cross_entropy(
                logits, targets[part], ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=smoothing
            )
            loss.backward()  # type: ignore[no-untyped-call]
        nats += loss.item()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    return nats, torch.cat(gradients)


def _time(
    candidate: Implementation, head: Any, hidden: torch.Tensor, targets: torch.Tensor, smoothing: float
) -> tuple[float, torch.Tensor, float]:
    """Return loss, gradient of the hidden states and seconds of the fastest round, the first one not counted."""
    # Leaves of their own, so that the model's gradients stay what they are.
    weight = head.weight.detach().requires_grad_(head.weight.requires_grad)
    bias = None if head.bias is None else head.bias.detach().requires_grad_(head.bias.requires_grad)
    # The fastest round: the others were disturbed, never helped, by what else the machine does.
    best, nats, gradient = float("inf"), 0.0, hidden
    for turn in range(_ROUNDS + 1):
        # (positions, features)
        leaf = hidden.clone().requires_grad_()
        weight.grad = None
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.enable_grad():
            loss = candidate(leaf, weight, bias, targets, smoothing)
            loss.backward()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        took = time.perf_counter() - began
        # The first round compiles, and chooses kernels.
        if turn:
            best = min(best, took)
        assert leaf.grad is not None
        nats, gradient = loss.item(), leaf.grad.float()
    return nats, gradient, best
