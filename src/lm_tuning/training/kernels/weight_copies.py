"""Products that read 16-bit copies of float32 master weights, and add their gradients up in float32.

Where all weights are trained, autocast casts each of them for every micro-batch; its gradient is made in 16 bits, cast
to float32 and added to the one before. Next to a product of many tokens that is little, but for each of six passes
over all weights the memory is read and written again. Here each weight is cast once per step, and its gradient is added
up in float32 inside of the product that makes it. The products read the same numbers as under autocast; the gradients
are rounded once less.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch.nn.functional import linear

from lm_tuning.training.kernels.compiled_layers import find_layers
from lm_tuning.wording import count_of

if TYPE_CHECKING:
    from lm_tuning.training.settings import TrainingSettings

# Only GPUs multiply 16 bits into float32, and only there passes over the weights are a part of a step worth saving.
_DEVICES = ("cuda",)
# Share of the memory left for activations that copies may take: smaller micro-batches cost more than casts.
_MOST_OF_THE_REST = 0.25
_GIB = 2**30

Give = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_COPY = "_lm_tuning_copy"

# The parameter of each copy, by where the copy lies in memory: a compiled graph hands over tensors, not parameters.
_masters: WeakValueDictionary[int, torch.nn.Parameter] = WeakValueDictionary()


@dataclass
class WeightCopies:
    """Copies of trained weights in the dtype of the products.

    Attributes:
        masters: the weights that are trained and stored, float32, ``(out, in)`` each.
        copies: what the products read, of the same shapes.
    """

    masters: list[torch.Tensor] = field(default_factory=list)
    copies: list[torch.Tensor] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies."""
        return sum(copy.nbytes for copy in self.copies)

    def refresh(self) -> None:
        """Cast every weight as it is now; needed before a step, since the last one has changed them."""
        with torch.no_grad():
            torch._foreach_copy_(self.copies, self.masters)


def choose_weight_copies(model: torch.nn.Module, settings: TrainingSettings) -> tuple[WeightCopies | None, str]:
    """Let products read copies where that saves time, and memory is left for them.

    Args:
        model: that is trained in full, frozen parts apart; changed in place where copies are made.
        settings: of the training.

    Returns:
        The copies, ``None`` for none, and the reason in words.
    """
    products = list(find_trained_products(model))
    reason = why_no_copies(settings, num_products=len(products)) or _describe_lack_of_memory(model, products, settings)
    if reason is not None:
        return None, f"no 16-bit copies, {reason}"
    copies = install_weight_copies(model, getattr(torch, settings.compute_dtype))
    return copies, (
        f"{settings.compute_dtype} copies for {count_of(len(products), 'product')}, {copies.num_bytes / _GIB:.2f} GiB, "
        "made once per step; their gradients are added up in float32 by the products"
    )


def why_no_copies(settings: TrainingSettings, *, num_products: int = 1) -> str | None:
    """Return what speaks against copies apart from their memory; ``None`` for nothing.

    Args:
        settings: of a training of all weights.
        num_products: that could read copies.
    """
    reasons = {
        f"since training runs on the {settings.device.upper()}": settings.device not in _DEVICES,
        f"since products are made in {settings.compute_dtype}": settings.compute_dtype != "bfloat16",
        "since no decoder layer has a plain product with float32 weights that are trained": not num_products,
        "since several processes exchange gradients": torch.distributed.is_available()
        and torch.distributed.is_initialized(),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _describe_lack_of_memory(model: torch.nn.Module, products: list[Any], settings: TrainingSettings) -> str | None:
    """Return why copies would leave too little for activations; ``None`` where they would not."""
    from lm_tuning.training.planning.memory import measure_model
    from lm_tuning.training.planning.out_of_memory import read_memory

    reading, held = read_memory(settings.device), measure_model(model, settings.train.trainer)
    taken = held.weights + held.buffers + held.gradients + held.optimizer_state + reading.others
    rest = settings.train.memory_fraction * reading.total - taken
    wanted = sum(module.weight.numel() for module in products) * getattr(torch, settings.compute_dtype).itemsize
    if wanted <= _MOST_OF_THE_REST * rest:
        return None
    return (
        f"since copies of {wanted / _GIB:.2f} GiB would take more than a quarter of the {max(rest, 0) / _GIB:.2f} GiB "
        "that weights, gradients and optimizer leave"
    )


def find_trained_products(model: torch.nn.Module) -> Iterator[Any]:
    """Yield the linear layers of the decoder whose float32 weights are trained, and that do nothing but multiply.

    Args:
        model: as it will be trained.
    """
    seen: set[int] = set()
    for layer in find_layers(model):
        for module in layer.modules():
            # A subclass may multiply with something else than its weight, as may whoever replaced the forward pass.
            if type(module) is not torch.nn.Linear or "forward" in vars(module) or id(module.weight) in seen:
                continue
            if module.weight.requires_grad and module.weight.dtype == torch.float32:
                seen.add(id(module.weight))
                yield module


def install_weight_copies(model: torch.nn.Module, dtype: torch.dtype = torch.bfloat16) -> WeightCopies:
    """Let the trained products of decoder layers read copies while the model is in training mode.

    The copies are no part of what is stored of the model. Gradients are written where the optimizer looks for them, but
    not by autograd: hooks on the weights are not called, as processes that exchange gradients would need.

    Args:
        model: changed in place.
        dtype: of the copies.

    Returns:
        The copies, true to the weights as they are now.
    """
    found = WeightCopies()
    for module in find_trained_products(model):
        # A parameter, since the compiler takes other tensors' sizes for ones that may change; not registered as one.
        copy = torch.nn.Parameter(module.weight.detach().to(dtype), requires_grad=False)
        vars(module)[_COPY] = copy
        # On the instance, so that other models of the process, and the class, stay as they are.
        module.forward = MethodType(_forward, module)
        _masters[copy.data_ptr()] = module.weight
        found.masters.append(module.weight)
        found.copies.append(copy)
    return found


def remove_weight_copies(model: torch.nn.Module) -> None:
    """Give every layer its own forward pass back, and let go of the copies."""
    for module in model.modules():
        copy = vars(module).pop(_COPY, None)
        if copy is not None:
            del module.forward
            _masters.pop(copy.data_ptr(), None)


def count_copy_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all copies that a model's layers read; 0 for none."""
    return sum(vars(module)[_COPY].nbytes for module in model.modules() if _COPY in vars(module))


def _forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Multiply with the copy where gradients may be asked for, and with the weight itself elsewhere."""
    # Outside of training steps nobody keeps the copies true, and autocast does the same.
    if not self.training:
        return linear(x, self.weight, self.bias)
    copy = vars(self)[_COPY]
    flat = x.reshape(-1, x.shape[-1]).to(copy.dtype)  # (tokens, in)
    bias = None if self.bias is None else self.bias.to(copy.dtype)  # (out,)
    # The compiler takes an operator as it is, and keeps its graphs; without it a function has less to do per call.
    product: Any = _product if torch.compiler.is_compiling() else _Product.apply
    return product(flat, copy, self.weight, bias).view(*x.shape[:-1], -1)  # type: ignore[no-any-return]


class _Product(torch.autograd.Function):
    """``x @ copy.t() + bias``, whose weight gradient is added to the master's."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, copy: torch.Tensor, master: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        # (tokens, in), (out, in), the same, (out,) to (tokens, out)
        ctx.save_for_backward(x, copy)
        return linear(x, copy, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _backward(ctx, *gradients, give=_give_gradients_now)


def _backward(ctx: Any, gradient: torch.Tensor, give: Give) -> tuple[torch.Tensor | None, ...]:
    x, copy = ctx.saved_tensors
    of_bias = gradient.sum(dim=0) if ctx.needs_input_grad[3] else None  # (tokens, out) to (out,)
    # The master's part is None: it has its gradient already.
    return give(gradient, x, copy), None, None, of_bias


def _give_gradients_now(gradient: torch.Tensor, x: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """Add the weight's gradient to its master's, and return that of the input, ``(tokens, in)``."""
    master = _masters[copy.data_ptr()]
    across = gradient.t()  # (out, tokens)
    # Only a GPU multiplies 16 bits into float32; elsewhere the product is rounded once, as under autocast.
    on_gpu = gradient.is_cuda and gradient.dtype != torch.float32
    if master.grad is None:
        master.grad = torch.mm(across, x, out_dtype=torch.float32) if on_gpu else (across @ x).float()
    elif on_gpu:
        torch.ops.aten.addmm.dtype_out(master.grad, across, x, torch.float32, out=master.grad)
    else:
        master.grad += across @ x
    return gradient @ copy


@torch.library.custom_op("lm_tuning::product", mutates_args=())
def _product(x: torch.Tensor, copy: torch.Tensor, master: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return linear(x, copy, bias)


@_product.register_fake
def _(x: torch.Tensor, copy: torch.Tensor, master: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((x.shape[0], copy.shape[0]))


# It changes a tensor that is none of its arguments, which the compiler need not know: no graph reads that tensor, and
# the operator is called once for each gradient, since its result is asked for and products are never made twice.
@torch.library.custom_op("lm_tuning::product_gradients", mutates_args=())
def _give_gradients(gradient: torch.Tensor, x: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    return _give_gradients_now(gradient, x, copy)


@_give_gradients.register_fake
def _(gradient: torch.Tensor, x: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    return gradient.new_empty((gradient.shape[0], copy.shape[1]))


def _set_up(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    x, copy, _, _ = inputs
    ctx.save_for_backward(x, copy)


# Not by asking whether something is compiled: PyTorch 2.11 says no while it traces this, and 2.13 yes.
_product.register_autograd(functools.partial(_backward, give=_give_gradients), setup_context=_set_up)
