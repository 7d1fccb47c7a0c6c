"""Compile the decoder layers of a model, one graph for all of them, where the run is long enough to pay for it.

A layer is compiled, not the whole model: all layers are alike, so that one graph serves every one of them, and
embedding, head and loss stay outside, where shapes change. The small operations of a layer are fused into few, which is
what a GPU waits for between matrix products.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lm_tuning.training.health.records import Facts
from lm_tuning.wording import count_of

logger = logging.getLogger(__name__)

# What compiling a layer and looking at larger micro-batches afterwards take at most: 8 to 15 s and 4 to 9 s on H100
# machines that had never compiled.
COMPILE_SECONDS = 30.0

# Share of the time that compiled layers save: 0.39 and 0.40 were seen on an H100, LoRA on 4B and all of 1.7B.
SAVED_FRACTION = 0.35


def find_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the decoder layers: the longest list of modules of one class in the model; empty where there is none."""
    # Experts and adapters stand in lists too; the decoder layers are the longest one of a single class.
    lists = [
        list(module)
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList) and len({type(entry) for entry in module}) == 1
    ]
    return max(lists, key=len, default=[])


def pays(
    *, num_tokens: float, parameters: int, flops: float, tokens_per_second: float | None = None
) -> tuple[bool, str]:
    """Estimate whether compiling saves more time than it takes.

    Args:
        num_tokens: that the run will train on.
        parameters: of the model.
        flops: floating-point operations per second that training reaches without it.
        tokens_per_second: as it was measured without it; ``None`` goes by ``parameters`` and ``flops``.

    Returns:
        The answer, and the estimate in words.
    """
    # Forward and backward take 4 operations per parameter and token with adapters and 6 where all is trained.
    seconds = num_tokens / tokens_per_second if tokens_per_second else 5 * parameters * num_tokens / flops
    saved = SAVED_FRACTION * seconds
    estimate = f"the run is estimated at {seconds:,.0f} s, compiling at {COMPILE_SECONDS:.0f} s to save {saved:,.0f} s"
    return saved > COMPILE_SECONDS, estimate


@dataclass
class CompiledLayers:
    """Layers that run compiled while training and as they are otherwise.

    Attributes:
        layers: the decoder layers.
        embeddings: of the input ids. Frozen under adapters, they make an input of the first layer that wants no
            gradient, for which that layer would need a graph of its own; while layers are compiled it is asked to want
            one, at the price of a few products of one layer.
        dynamic: one graph for every number of tokens; otherwise one per number.
        backend: of ``torch.compile``.
    """

    layers: list[torch.nn.Module]
    embeddings: torch.nn.Module | None = None
    dynamic: bool = True
    backend: str = "inductor"
    _hook: Any = None

    def switch_on(self) -> None:
        """Let the layers run compiled; the first pass compiles."""
        # Otherwise every scaling and epsilon is an argument of the graph, read again at each call of each layer, and
        # what they are is found out by compiling a part of it twice.
        torch._dynamo.config.specialize_float = True
        # In place: the layer stays the module that it was, with the same names in what is stored.
        for layer in self.layers:
            layer.compile(dynamic=self.dynamic, backend=self.backend)
        first_learns = any(parameter.requires_grad for parameter in self.layers[0].parameters())
        if self.embeddings is not None and first_learns and self._hook is None:
            self._hook = self.embeddings.register_forward_hook(_ask_for_gradient)

    def switch_off(self) -> None:
        """Let the layers run as they are."""
        for layer in self.layers:
            layer._compiled_call_impl = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def compile_with(self, run: Callable[[], object], facts: Facts) -> None:
        """Compile by running a micro-batch forward and backward; go back to plain layers if that fails.

        The run's random state is left as it was.

        Args:
            run: makes the forward and backward pass; the caller throws its gradients away.
            facts: receives ``compile_seconds``, and ``compile_failure`` in words.
        """
        layers = count_of(len(self.layers), "decoder layer")
        logger.info("Compiling %s, which takes up to a minute ...", layers)
        facts.pop("compile_failure", None)  # of the process before a resume
        began = time.perf_counter()
        # Dropout in the micro-batch that is thrown away would move the run's random numbers on.
        on_gpu = [torch.cuda.current_device()] if next(self.layers[0].parameters()).is_cuda else []
        self.switch_on()
        try:
            with torch.random.fork_rng(devices=on_gpu):
                run()
        # Memory says nothing against compiling: whoever splits steps smaller tries again.
        except torch.OutOfMemoryError:
            self.switch_off()
            raise
        # Whatever the compiler raises: it is many libraries deep, and a run without it is only slower.
        except Exception as error:
            self.switch_off()
            lines = str(error).strip().splitlines() or [""]
            facts["compile_failure"] = failure = f"{type(error).__name__}: {lines[0]}"
            logger.warning(
                "The decoder layers could not be compiled (%s); they run as they are, slower and with the same result. "
                "train.compile=false skips the attempt.",
                failure,
            )
        else:
            logger.info("Compiled %s in %.0f s.", layers, time.perf_counter() - began)
        facts["compile_seconds"] = time.perf_counter() - began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run the block without compiled layers: evaluations have shapes of their own."""
        # What torch.nn.Module calls in place of forward, when it is set; nothing is compiled again on the way back.
        kept = [layer._compiled_call_impl for layer in self.layers]
        for layer in self.layers:
            layer._compiled_call_impl = None
        try:
            yield
        finally:
            for layer, call in zip(self.layers, kept, strict=True):
                layer._compiled_call_impl = call


def _ask_for_gradient(module: torch.nn.Module, given: Any, output: torch.Tensor) -> None:
    if torch.is_grad_enabled() and output.is_floating_point() and not output.requires_grad:
        output.requires_grad_()
