"""Make steps fast without changing what they compute: packing, attention, loss, adapters, compiling, CUDA graphs.

Each of these has conditions, and each says what it chose and why. What a step computes is fixed by the step plan, and
the checks before step 1 compare it with an ordinary forward pass of each row, so a wrong choice would stop the run.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear

from lm_tuning.batching import packed_attention
from lm_tuning.batching.head_loss import choose_head_loss
from lm_tuning.batching.micro_batches import Batching, choose_batching
from lm_tuning.batching.tasks.base import Packing
from lm_tuning.errors import UserError
from lm_tuning.models.structure import inner_model
from lm_tuning.runtime.precision import autocast
from lm_tuning.training.kernels.compiled_layers import CompiledLayers, find_layers, pays
from lm_tuning.training.kernels.fp8 import Fp8Layers
from lm_tuning.training.kernels.fp8_trial import choose_fp8
from lm_tuning.training.kernels.recording import find_recorder
from lm_tuning.training.kernels.step_graph import MIN_STEPS
from lm_tuning.wording import count_of

if TYPE_CHECKING:
    from lm_tuning.batching.step_plan import StepPlan
    from lm_tuning.text.store.table import TokenTable
    from lm_tuning.training.settings import TrainingSettings
    from lm_tuning.training.setup.model import ReadyModel

logger = logging.getLogger(__name__)

# Matrix products on a GPU run in tiles of 128 rows.
_GPU_POSITION_MULTIPLE = 128

# Rows among which a short one is chosen, for trying the loss on.
_ROWS_TRIED = 64
# Operations per second that 16-bit training reaches without compiling, by the major compute capability, roughly.
_EAGER_FLOPS = {9: 250e12, 8: 100e12}
_OLDER_FLOPS = 30e12


@dataclass
class FastPath:
    """What was chosen for a model.

    Attributes:
        batching: how rows share a micro-batch.
        facts: the choices and their reasons, for the health report.
        layers: decoder layers that run compiled; ``None`` for none.
        may_record: whether steps may be recorded in CUDA graphs; a step of the training decides.
        fp8: frozen layers that are to run in 8 bits from the first step on; ``None`` for none.
    """

    batching: Batching
    facts: dict[str, str] = field(default_factory=dict)
    layers: CompiledLayers | None = None
    may_record: bool = False
    fp8: Fp8Layers | None = None
    _attention: str | None = None

    def undo(self, model: Any) -> None:
        """Leave the model as it was, so that what is stored or evaluated of it carries nothing of ours."""
        # In the reverse order of what was put in place: a compiled layer holds on to the forward passes inside of it.
        if self.layers is not None:
            self.layers.switch_off()
        if self.fp8 is not None:
            self.fp8.switch_off()
        remove_fused_lora(model)
        if self._attention is not None:
            inner_model(model).set_attn_implementation(self._attention)


def prepare_fast_path(
    ready: ReadyModel,
    settings: TrainingSettings,
    train_rows: TokenTable,
    plan: StepPlan | None = None,
    *,
    held_out_rows: TokenTable | None = None,
    tokens_per_second: float | None = None,
) -> FastPath:
    """Choose what makes the steps fast, and put it in place.

    Args:
        ready: model and task; the model's attention and adapter layers are changed, the task learns what was chosen.
        settings: of the training.
        train_rows: all rows that are trained on.
        plan: of the run, for the estimate whether compiling pays; ``None`` leaves layers as they are.
        held_out_rows: rows that are measured while training, through the same attention; ``None`` for none.
        tokens_per_second: that were measured without compiling; ``None`` estimates them.

    Raises:
        UserError: packing was asked for and the model carries a state from row to row.
    """
    model, task = ready.model, ready.task
    # Of all rows, since a sliding window that no row reaches beyond is the same as none.
    longest = int(train_rows.lengths.max(initial=0))
    if held_out_rows is not None:
        longest = max(longest, int(held_out_rows.lengths.max(initial=0)))
    fast = _choose_batching(ready, settings, longest)
    if settings.train.method != "full":
        # Before anything is compiled or tried, so that it is these forward passes that are.
        fused = install_fused_lora(model)
        fast.facts["adapters"] = (
            f"fused LoRA forward in {count_of(fused, 'layer')}" if fused else "the library's forward pass"
        )
    if task.name == "causal_lm":
        # Tried as training runs it: what a kernel takes depends on the dtype that autocast gives it.
        with autocast(settings.device, settings.compute_dtype):
            task.head_loss, reason = choose_head_loss(
                model,
                _short_row(train_rows),
                device=settings.device,
                compute_dtype=settings.compute_dtype,
                label_smoothing=settings.train.label_smoothing,
                num_positions=math.inf if plan is None else _epochs(plan) * float(train_rows.num_supervised.sum()),
            )
        fast.facts["head_loss"] = reason
    if plan is not None:
        fast.layers, fast.facts["compile"] = _choose_compiling(ready, settings, train_rows, plan, tokens_per_second)
        if settings.train.fp8:
            fast.fp8, fast.facts["fp8"] = choose_fp8(ready.model, settings, compiles=fast.layers is not None)
        fast.may_record, fast.facts["cuda_graphs"] = _choose_recording(ready, settings, plan, fast)
    for name, reason in fast.facts.items():
        logger.info("%s: %s.", _NAMES[name], reason)
    return fast


_NAMES = {
    "batching": "Batching",
    "adapters": "Adapters",
    "head_loss": "Loss of the head",
    "compile": "Compiled layers",
    "fp8": "Products in 8 bits",
    "cuda_graphs": "CUDA graphs",
}


def _choose_batching(ready: ReadyModel, settings: TrainingSettings, longest: int) -> FastPath:
    """Pack rows where the model's attention can be told where they begin, or where a mask costs little."""
    task, wanted = ready.task, settings.train.batching
    if not task.can_pack:
        if wanted == "packed":
            raise UserError("train.batching = packed: an encoder-decoder cannot be packed; set auto or padded.")
        return FastPath("padded", {"batching": "padded, rows of like length together: an encoder looks both ways"})
    if wanted == "padded":
        return FastPath("padded", {"batching": "padded, as train.batching says"})
    # A user's own choice of attention is kept, even where rows then need a mask that costs memory.
    if settings.attention != "auto":
        batching = choose_batching(wanted, device=settings.device, attention=settings.attention)
        what = "rows kept apart by a mask" if batching == "packed" else "rows of like length together"
        reason = f"{batching}, {what}, since model.attention = {settings.attention}"
        return FastPath(batching, {"batching": reason})
    # Tried as training runs it, as the head's loss is.
    with autocast(settings.device, settings.compute_dtype):
        why_not = packed_attention.why_not(ready.model, device=settings.device, longest_row_tokens=longest)
    if why_not is not None:
        if wanted == "packed":
            raise UserError(f"train.batching = packed cannot be had: {why_not}. Set train.batching to auto or padded.")
        reason = f"padded, rows of like length together, since {why_not}"
        return FastPath("padded", {"batching": reason})
    # transformers looks an attention up by name at each call, so that setting the name is all there is to do.
    packed_attention.register()
    inner = inner_model(ready.model)
    before = inner.config._attn_implementation
    inner.set_attn_implementation(packed_attention.NAME)
    on_gpu = settings.device == "cuda"
    task.packing = Packing(by_bounds=True, position_multiple=_GPU_POSITION_MULTIPLE if on_gpu else 1)
    # The kernel takes 16 bits alone; float32 on a GPU goes row by row as on a CPU.
    how = "one variable-length kernel" if on_gpu and settings.compute_dtype != "float32" else "row by row"
    return FastPath("packed", {"batching": f"packed without padding, attention {how}"}, _attention=before)


def _epochs(plan: StepPlan) -> float:
    return plan.total_steps / plan.steps_per_epoch


def eager_flops() -> float:
    """Return the floating-point operations per second that 16-bit training reaches on this card without compiling."""
    if not torch.cuda.is_available():
        return _OLDER_FLOPS
    return _EAGER_FLOPS.get(torch.cuda.get_device_capability()[0], _OLDER_FLOPS)


def _choose_recording(
    ready: ReadyModel, settings: TrainingSettings, plan: StepPlan, fast: FastPath
) -> tuple[bool, str]:
    """Return whether steps may be recorded in CUDA graphs, as far as that can be told before the first one."""
    train, task = settings.train, ready.task
    if train.cuda_graphs is False:
        return False, "no, as train.cuda_graphs says"
    if find_recorder(settings.device) is None:
        return False, f"no, since training runs on the {settings.device.upper()}"
    reasons = {
        f"the run has {count_of(plan.total_steps, 'step')}": plan.total_steps < MIN_STEPS,
        "rows of an encoder-decoder go with a mask": not task.can_pack,
        "packed rows are kept apart by a mask": fast.batching == "packed" and not task.packing.by_bounds,
        "packed rows are attended to one by one in float32": fast.batching == "packed"
        and settings.device == "cuda"
        and settings.compute_dtype == "float32",
        "float16 changes the scale of its loss from step to step": settings.compute_dtype == "float16",
        "NEFTune's noise depends on how far rows are filled up": train.neftune_noise_alpha is not None,
        "several processes exchange gradients": torch.distributed.is_available() and torch.distributed.is_initialized(),
    }
    for reason, holds in reasons.items():
        if holds:
            return False, f"no, since {reason}"
    return True, f"to be tried at step 2, as train.cuda_graphs = {str(train.cuda_graphs).lower()} says"


def _choose_compiling(
    ready: ReadyModel,
    settings: TrainingSettings,
    train_rows: TokenTable,
    plan: StepPlan,
    tokens_per_second: float | None,
) -> tuple[CompiledLayers | None, str]:
    inner = inner_model(ready.model)
    layers = find_layers(inner)
    # Made in any case, since making one changes nothing; it is switched on at the first step.
    compiled = CompiledLayers(layers, embeddings=inner.get_input_embeddings())
    if settings.train.compile is False:
        return None, "no, as train.compile says"
    if not layers:
        return None, f"no, since {type(inner).__name__} has no list of like layers"
    if settings.train.compile == "auto":
        if settings.device != "cuda":
            return None, "no, since training runs on the CPU"
        # Tokens over the whole run, by the mean: compiling is paid for once, and saves at every step.
        num_tokens = _epochs(plan) * float(train_rows.lengths.sum())
        parameters = sum(parameter.numel() for parameter in ready.model.parameters())
        worth, estimate = pays(
            num_tokens=num_tokens, parameters=parameters, flops=eager_flops(), tokens_per_second=tokens_per_second
        )
        if not worth:
            return None, f"no, since {estimate}"
        return compiled, f"{count_of(len(layers), 'layer')}, since {estimate}"
    slow = "" if settings.device == "cuda" else "; on a CPU that seldom pays, and rows are still attended to one by one"
    return compiled, f"{count_of(len(layers), 'layer')}, as train.compile says{slow}"


def _short_row(table: TokenTable) -> Any:
    """Return the token ids of a short row among the first ones."""
    position = int(table.lengths[:_ROWS_TRIED].argmin())
    return table[position].input_ids.copy()


def install_fused_lora(model: torch.nn.Module) -> int:
    """Give every plain LoRA layer a fused forward pass.

    Adapters are kept in float32, since their updates are small. The library casts every layer's input up to float32 for
    them, and autocast casts it down again for the product; the input is a thousand times larger than the adapter. Here
    the two small matrices are cast instead. What is computed is the same: under autocast the products were made in 16
    bits before, too.

    Layers with dropout, a variant such as DoRA, a bias of the adapter or more than one adapter keep the library's.

    Args:
        model: with adapters; changed in place. What is stored of it stays the same.

    Returns:
        How many layers have it.
    """
    count = 0
    for module in model.modules():
        if _is_plain_lora(module):
            # On the instance, so that other models of the process, and the class, keep the library's.
            module.forward = MethodType(_fused_forward, module)
            count += 1
    return count


def remove_fused_lora(model: torch.nn.Module) -> None:
    """Give every layer the library's forward pass back."""
    for module in model.modules():
        # Other libraries put functions of their own there too, such as accelerate's wrapper; those stay.
        if getattr(module.__dict__.get("forward"), "__func__", None) is _fused_forward:
            del module.forward


def _fused_forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Add the adapter's part to the frozen layer's result."""
    # An evaluation of the base model switches adapters off; merged ones are in the frozen weights already.
    if self.disable_adapters or self.merged or args or kwargs:
        return type(self).forward(self, x, *args, **kwargs)  # type: ignore[no-any-return]
    [name] = self.active_adapters
    result = self.base_layer(x)
    # (r, in) and (out, r): a thousandth of the activations (tokens, in), so that casting them costs next to nothing.
    down, up = self.lora_A[name].weight.to(result.dtype), self.lora_B[name].weight.to(result.dtype)
    # (..., r)
    hidden = linear(x.to(result.dtype), down)
    # Scaled on the small matrix, not on the activations, (..., out).
    return result + linear(hidden, up * self.scaling[name])  # type: ignore[no-any-return]


def _is_plain_lora(module: Any) -> bool:
    """Return whether a module is a LoRA layer over a linear one with nothing special about it."""
    from peft.tuners.lora.layer import LoraLayer

    if not isinstance(module, LoraLayer) or module.merged or module.lora_variant:
        return False
    # Several adapters would be added up, or chosen among, by the library's own rules.
    names = list(module.lora_A)
    if len(names) != 1 or list(module.active_adapters) != names or module.lora_embedding_A:
        return False
    [name] = names
    dropout = module.lora_dropout[name]
    matrices: tuple[Any, Any] = (module.lora_A[name], module.lora_B[name])
    return (
        all(type(matrix) is torch.nn.Linear and matrix.bias is None for matrix in matrices)
        and not getattr(dropout, "p", 0.0)
        and hasattr(module.get_base_layer(), "in_features")
    )
