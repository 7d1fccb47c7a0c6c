"""Products that read 16-bit copies of the float32 weights that are trained.

Autocast casts each weight for every micro-batch; its gradient is made in 16 bits, cast to float32 and added to the one
before. Here a weight is cast when its layer is changed, and the product makes its gradient in float32: for autograd to
add up, or added to the weight's gradient inside of the product.
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.nn.functional import linear

# The weight of each copy, by where the copy lies in memory: a compiled graph hands over tensors, not parameters.
_masters: WeakValueDictionary[int, torch.nn.Parameter] = WeakValueDictionary()


def install_copies(model: Any, *, adds: bool) -> None:
    """Let the linear layers of a decoder read copies.

    Args:
        model: in float32; changed in place.
        adds: whether a product adds a weight's gradient to what is there, past autograd.
    """
    for layer in model.model.layers:
        for module in layer.modules():
            if type(module) is torch.nn.Linear:
                # A parameter, since the compiler takes other tensors' sizes for ones that may change.
                copy = torch.nn.Parameter(module.weight.detach().bfloat16(), requires_grad=False)
                _masters[copy.data_ptr()] = module.weight
                module.__dict__["bench_copy"] = copy
                module.forward = MethodType(functools.partial(_forward, adds=adds), module)


def _forward(self: Any, x: torch.Tensor, *, adds: bool) -> torch.Tensor:
    product: Any = multiply if adds else Returning.apply
    flat = x.reshape(-1, x.shape[-1]).bfloat16()  # (tokens, in)
    return product(flat, self.bench_copy, self.weight).view(*x.shape[:-1], -1)


def _across(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return ``gradient.t() @ x`` in float32; only a GPU multiplies 16 bits into it."""
    across = gradient.t()
    return torch.mm(across, x, out_dtype=torch.float32) if x.is_cuda else (across @ x).float()


class Returning(torch.autograd.Function):
    """A product over a copy that returns its weight's gradient in float32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, copy: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        ctx.save_for_backward(x, copy)
        return linear(x, copy)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of input and weight."""
        [gradient] = gradients
        x, copy = ctx.saved_tensors
        return gradient @ copy, None, _across(gradient, x)


@torch.library.custom_op("lm_tuning_bench::multiply", mutates_args=())
def multiply(x: torch.Tensor, copy: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """Return ``x @ copy.t()``; the weight is an argument so that a gradient is asked for."""
    return linear(x, copy)


@multiply.register_fake
def _(x: torch.Tensor, copy: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[0], copy.shape[0]))


# It changes a tensor that is none of its arguments and that no graph reads; its result is asked for, so it is called.
@torch.library.custom_op("lm_tuning_bench::add_gradient", mutates_args=())
def add_gradient(gradient: torch.Tensor, x: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """Add the weight's gradient to what is there, and return that of the input."""
    master = _masters[copy.data_ptr()]
    if master.grad is None:
        master.grad = _across(gradient, x)
    elif x.is_cuda:
        torch.ops.aten.addmm.dtype_out(master.grad, gradient.t(), x, torch.float32, out=master.grad)
    else:
        master.grad += gradient.t() @ x
    return gradient @ copy


@add_gradient.register_fake
def _(gradient: torch.Tensor, x: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    return gradient.new_empty((gradient.shape[0], copy.shape[1]))


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])


def _go_back(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return add_gradient(gradient, *ctx.saved_tensors), None, None


multiply.register_autograd(_go_back, setup_context=_keep)
