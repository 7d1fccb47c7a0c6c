"""Other ways to make a decoder layer's products: adapters and weights of layers that share their input, in 8 bits, too.

Layers that are given the same tensor (query, key and value; gate and up) form a group. The first of them to be called
makes the results of all, the others take theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch.nn.functional import linear

GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


@dataclass(frozen=True)
class Form:
    """How a group's products are made.

    Attributes:
        join_forward: groups (by their number of members) whose results are one product.
        join_backward: groups whose gradients are one matrix.
        augment: groups whose adapters are further columns of the frozen weight, ``[x, hA] @ [W, B]``.
        one_pass: one kernel reads the gradient once for both that it gives an adapter.
        rows: augmented weights have the adapters' other matrix as further rows, ``[dy, dh] @ [W; A]``.
        in_place: adapters' results are added in place, where PyTorch's product would copy what it adds to.
        fp8: ``row`` or ``tensor`` scales of products in 8 bits; ``None`` for 16 bits.
        fp8_backward: whether gradients are 8-bit products too.
    """

    join_forward: tuple[int, ...] = ()
    join_backward: tuple[int, ...] = ()
    augment: tuple[int, ...] = ()
    one_pass: bool = False
    rows: bool = False
    in_place: bool = False
    fp8: str | None = None
    fp8_backward: bool = True


def quantize_rows(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in 8 bits and the scale of each row, ``(rows, 1)``."""
    wide = matrix.float()
    scale = wide.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / FP8_MAX
    return (wide / scale).to(FP8), scale


def quantize(matrix: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return a matrix in 8 bits with a scale that is known before, a scalar."""
    return (matrix.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def scaled_mm(left: Any, right: Any, left_scale: Any, right_scale: Any) -> torch.Tensor:
    """Return ``left @ right.t()`` of 8-bit matrices in bfloat16."""
    # (rows of right, 1) or a scalar
    if not left.is_cuda:
        return ((left.float() * left_scale) @ (right.float() * right_scale).t()).bfloat16()
    across = right_scale.reshape(1, -1) if right_scale.numel() > 1 else right_scale
    return torch._scaled_mm(
        left, right.t(), scale_a=left_scale, scale_b=across, out_dtype=torch.bfloat16, use_fast_accum=True
    )


# ------------------------------------------------------------------------------------------ one pass over the gradient

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if triton is not None:

    @triton.jit
    def _adapter_kernel(  # noqa: PLR0917
        grad, up, hidden, of_hidden, of_up, tokens, width, grad_row, up_row, hidden_row, blocks_each,
        rank: tl.constexpr, rows_block: tl.constexpr, columns_block: tl.constexpr,
    ):  # fmt: skip
        at_rows, at_columns = tl.program_id(0), tl.program_id(1)
        rows = at_rows * rows_block + tl.arange(0, rows_block)
        ranks = tl.arange(0, rank)
        inside = rows < tokens
        low = tl.load(hidden + rows[:, None] * hidden_row + ranks[None, :], mask=inside[:, None], other=0.0)
        total = tl.zeros((rows_block, rank), dtype=tl.float32)
        for block in range(at_columns * blocks_each, (at_columns + 1) * blocks_each):
            columns = block * columns_block + tl.arange(0, columns_block)
            fits = columns < width
            part = tl.load(
                grad + rows[:, None].to(tl.int64) * grad_row + columns[None, :],
                mask=inside[:, None] & fits[None, :], other=0.0,
            )  # fmt: skip
            weight = tl.load(up + columns[:, None] * up_row + ranks[None, :], mask=fits[:, None], other=0.0)
            total = tl.dot(part, weight, total)
            tl.store(
                of_up + (at_rows * width + columns[:, None]) * rank + ranks[None, :],
                tl.dot(tl.trans(part), low), mask=fits[:, None],
            )  # fmt: skip
        tl.store(of_hidden + (at_columns * tokens + rows[:, None]) * rank + ranks[None, :], total, mask=inside[:, None])


@torch.library.custom_op("lm_tuning_bench::adapter_gradients", mutates_args=())
def adapter_gradients(grad: torch.Tensor, up: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``grad @ up`` and ``grad.t() @ hidden``: (tokens, rank) and (width, rank)."""
    if not grad.is_cuda or triton is None:
        return grad @ up, grad.t() @ hidden
    (tokens, width), rank = grad.shape, up.shape[1]
    rows_block, columns_block, parts = 256, 64, 8
    chunks = triton.cdiv(tokens, rows_block)
    blocks_each = triton.cdiv(triton.cdiv(width, columns_block), parts)
    of_hidden = grad.new_zeros((parts, tokens, rank), dtype=torch.float32)
    of_up = grad.new_empty((chunks, width, rank), dtype=torch.float32)
    _adapter_kernel[(chunks, parts)](
        grad, up, hidden, of_hidden, of_up, tokens, width, grad.stride(0), up.stride(0), hidden.stride(0), blocks_each,
        rank=rank, rows_block=rows_block, columns_block=columns_block, num_warps=8, num_stages=3,
    )  # fmt: skip
    return of_hidden.sum(0).to(grad.dtype), of_up.sum(0).to(grad.dtype)


@adapter_gradients.register_fake
def _(grad: torch.Tensor, up: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return grad.new_empty((grad.shape[0], up.shape[1])), grad.new_empty((grad.shape[1], hidden.shape[1]))


@torch.library.custom_op("lm_tuning_bench::add_product", mutates_args=("total",))
def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add ``left @ right`` to a matrix."""
    total.addmm_(left, right)


@add_product.register_fake
def _(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    return None


def added(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, form: Form) -> torch.Tensor:
    """Return ``total + left @ right``; ``total`` is not used afterwards."""
    if not form.in_place:
        return torch.addmm(total, left, right)
    add_product(total, left, right)
    return total


# --------------------------------------------------------------------------------------------------- adapters, grouped


class GroupedLora(torch.autograd.Function):
    """Frozen products and adapters of layers with one input.

    Shapes: input ``(tokens, in)``; down ``(members * rank, in)``; weight ``(all out, in)``, augmented
    ``(all out, in + members * rank)``; each up ``(out, rank)``, scaled.
    """

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, x: Any, down: Any, weight: Any, low: Any, form: Form, splits: Any, *ups: Any
    ) -> Any:
        """Return the result, or one of each member."""
        members, rank = len(splits), ups[0].shape[1]
        hidden = x @ down.t()  # (tokens, members * rank)
        rows = weight[: sum(splits)].split(splits)
        lows = hidden.split(rank, dim=1)
        if form.fp8 is not None:
            weight8, weight_scale, _, _, x_scale, _ = low
            x8, scale = quantize_rows(x) if form.fp8 == "row" else (quantize(x, x_scale), x_scale)
            if members in form.join_forward:
                base = scaled_mm(x8, weight8, scale, weight_scale)
                results = [torch.addmm(b, h, up.t()) for b, h, up in zip(base.split(splits, 1), lows, ups, strict=True)]
            else:
                scales = weight_scale.split(splits) if form.fp8 == "row" else [weight_scale] * members
                results = [
                    added(scaled_mm(x8, w, scale, s), h, up.t(), form)
                    for w, s, h, up in zip(weight8.split(splits), scales, lows, ups, strict=True)
                ]
        elif members in form.augment:
            both = torch.cat([x, hidden], dim=1)
            if members in form.join_forward:
                results = [both @ weight[: sum(splits)].t()]
            else:
                results = [both @ part.t() for part in rows]
        elif members in form.join_forward:
            block = torch.block_diag(*ups)  # (all out, members * rank)
            results = [added(x @ weight.t(), hidden, block.t(), form)]
        else:
            results = [added(x @ w.t(), h, up.t(), form) for w, h, up in zip(rows, lows, ups, strict=True)]
        ctx.save_for_backward(x, down, weight, hidden, *ups)
        ctx.form, ctx.splits, ctx.low = form, splits, low
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients of input, down and ups."""
        x, down, weight, hidden, *ups = ctx.saved_tensors
        form, splits = ctx.form, ctx.splits
        members, rank, width = len(splits), ups[0].shape[1], x.shape[1]
        has_rows = form.rows and members in form.augment
        everything, weight = weight[:, :width], weight[: sum(splits), :width]
        lows = hidden.split(rank, dim=1)
        joined = None
        if len(grads) < members:
            [joined] = grads
            grads = joined.split(splits, dim=1)
        elif members in form.join_backward:
            joined = torch.cat(grads, dim=1)
            grads = joined.split(splits, dim=1)
        if form.one_pass:
            pairs = [adapter_gradients(g, up, h) for g, up, h in zip(grads, ups, lows, strict=True)]
        elif joined is not None and members > 1:
            of_hidden = joined @ torch.block_diag(*ups)
            of_block = joined.t() @ hidden  # (all out, members * rank); only the diagonal blocks are wanted
            blocks = [part[:, i * rank : (i + 1) * rank] for i, part in enumerate(of_block.split(splits))]
            pairs = list(zip(of_hidden.split(rank, dim=1), blocks, strict=True))
        else:
            pairs = [(g @ up, g.t() @ h) for g, up, h in zip(grads, ups, lows, strict=True)]
        of_hidden = torch.cat([pair[0] for pair in pairs], dim=1) if len(pairs) > 1 else pairs[0][0]
        if form.fp8 is not None and form.fp8_backward:
            _, _, turned, turned_scale, _, grad_scale = ctx.low
            if joined is None:
                joined = torch.cat(grads, dim=1) if members > 1 else grads[0]
            g8, scale = quantize_rows(joined) if form.fp8 == "row" else (quantize(joined, grad_scale), grad_scale)
            of_x = scaled_mm(g8, turned, scale, turned_scale)
        elif has_rows:
            of_x = torch.cat([*grads, of_hidden], dim=1) @ everything
        elif joined is not None:
            of_x = joined @ weight
        else:
            parts = weight.split(splits)
            of_x = grads[0] @ parts[0]
            for g, w in zip(grads[1:], parts[1:], strict=True):
                of_x = added(of_x, g, w, form)
        if not has_rows:
            of_x = added(of_x, of_hidden, down, form)
        return of_x, of_hidden.t() @ x, None, None, None, None, *(pair[1] for pair in pairs)


class Group:
    """Layers that share their input."""

    def __init__(self, members: list[Any], form: Form | None) -> None:
        """Build one matrix of the members' frozen weights."""
        self.members, self.form = members, form
        self.input: Any = None
        self.results: Any = None
        self.low: Any = None
        self.splits = tuple(member.out_features for member in members)
        if form is None:
            return
        self.scales = tuple(member.scaling["default"] for member in members)
        first = members[0].base_layer.weight
        extra = sum(member.lora_A["default"].weight.shape[0] for member in members)
        extra = extra if len(members) in form.augment else 0
        self.weight = first.new_zeros((sum(self.splits) + extra * form.rows, first.shape[1] + extra))
        joined = self.weight[: sum(self.splits)]
        for part, member in zip(joined.split(self.splits), members, strict=True):
            part[:, : first.shape[1]] = member.base_layer.weight.data
            member.base_layer.weight.data = part[:, : first.shape[1]]
        if form.fp8 == "row":
            self.low = (*quantize_rows(joined), *quantize_rows(joined.t().contiguous()), None, None)
        elif form.fp8 == "tensor":
            scale = joined.float().abs().max() / FP8_MAX
            eight = quantize(joined, scale)
            self.low = (eight, scale, eight.t().contiguous(), scale, scale.new_tensor(0.02), scale.new_tensor(0.0005))
        self.refresh()

    def refresh(self) -> None:
        """Write the adapters behind the frozen columns."""
        if self.form is None or len(self.members) not in self.form.augment:
            return
        width = start = self.members[0].in_features
        if self.form.rows:
            downs = [member.lora_A["default"].weight.detach() for member in self.members]
            self.weight[sum(self.splits) :, :width] = torch.cat(downs)
        for part, member, scale in zip(
            self.weight[: sum(self.splits)].split(self.splits), self.members, self.scales, strict=True
        ):
            up = member.lora_B["default"].weight.detach()
            part[:, start : start + up.shape[1]] = up * scale
            start += up.shape[1]

    def run(self, x: torch.Tensor) -> Any:
        """Return the results of all members."""
        flat, dtype = x.reshape(-1, x.shape[-1]), torch.bfloat16
        if self.form is None:
            weight = torch.cat([member.weight for member in self.members]).to(dtype)
            results = linear(flat.to(dtype), weight).split(self.splits, dim=1)
        else:
            dtype = self.weight.dtype
            downs = [member.lora_A["default"].weight for member in self.members]
            down = (torch.cat(downs) if len(downs) > 1 else downs[0]).to(dtype)
            ups = [
                m.lora_B["default"].weight.to(dtype) * scale for m, scale in zip(self.members, self.scales, strict=True)
            ]
            results = GroupedLora.apply(flat.to(dtype), down, self.weight, self.low, self.form, self.splits, *ups)
            if len(results) < len(self.members):
                results = results[0].split(self.splits, dim=1)
        return [result.view(*x.shape[:-1], result.shape[-1]) for result in results]


def _member_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    group, index = self.bench_group, self.bench_index
    if len(group.members) == 1:
        return group.run(x)[0]
    if group.input is not x:
        group.input, group.results = x, group.run(x)
    result = group.results[index]
    if index == len(group.members) - 1:
        group.input = group.results = None
    return result


def install_groups(model: Any, form: Form | None, groups: Any = GROUPS) -> list[Group]:
    """Group the layers of a model; ``form`` is ``None`` for plain layers that are trained."""
    found = []
    for parent in list(model.modules()):
        for names in groups:
            if not all(hasattr(parent, name) for name in names):
                continue
            group = Group([getattr(parent, name) for name in names], form)
            found.append(group)
            for index, member in enumerate(group.members):
                member.bench_group, member.bench_index = group, index
                member.forward = MethodType(_member_forward, member)
    return found


def install_plain(model: Any) -> None:
    """Write each adapter's result and add it afterwards: the path that others are compared with."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        result = self.base_layer(x)
        down, up = (getattr(self, n)["default"].weight.to(result.dtype) for n in ("lora_A", "lora_B"))
        return result + linear(linear(x.to(result.dtype), down), up * self.scaling["default"])

    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.forward = MethodType(forward, module)


def install_liger(model: Any) -> None:
    """Return nothing; Liger's norms and feed-forward layers take the place of the model's."""
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    apply_liger_kernel_to_qwen3(model=inner, rope=False, cross_entropy=False, fused_linear_cross_entropy=False)


# ----------------------------------------------------------------------------------------------------------- attention


def document_mask(bounds: torch.Tensor, tokens: int) -> Any:
    """Return flex attention's mask of rows that lie end to end, made without a matrix of all positions."""
    from torch.nn.attention.flex_attention import BlockMask

    size = 128
    position = torch.arange(tokens, device=bounds.device)
    row = torch.searchsorted(bounds[1:].long(), position, right=True).clamp(max=len(bounds) - 2)  # (tokens,)
    blocks = -(-tokens // size)
    query = torch.arange(blocks, device=bounds.device)
    first = bounds.long()[row[query * size]] // size  # the block in which the row of a block's first position begins
    count = (query - first + 1).int()
    order = (first[:, None] + torch.arange(blocks, device=bounds.device)[None]).clamp(max=blocks - 1).int()

    def mask(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (row[q] == row[k])

    return BlockMask.from_kv_blocks(
        count[None, None], order[None, None], BLOCK_SIZE=size, mask_mod=mask, seq_lengths=(tokens, tokens)
    )


def flex(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    *,
    scaling: Any = None,
    block_mask: Any = None,
    **others: Any,
) -> Any:
    """Attend within rows by flex attention."""
    from torch.nn.attention.flex_attention import flex_attention

    query, key = query.to(value.dtype), key.to(value.dtype)
    out = flex_attention(query, key, value, block_mask=block_mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None
