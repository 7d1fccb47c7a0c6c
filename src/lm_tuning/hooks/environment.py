"""Set threads, allocator and torch's switches, each early enough to take effect."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from kedro.framework.hooks import hook_impl

from lm_tuning.hooks.parameters import settle_parameters
from lm_tuning.progress import keep_log_lines_whole
from lm_tuning.runtime.backend import apply_backend, summarize_facts
from lm_tuning.runtime.device import probe_device, read_processor
from lm_tuning.runtime.facts import remember_decisions
from lm_tuning.runtime.threads import (
    apply_variables,
    find_openmp,
    plan_variables,
    summarize_decisions,
    tokenizer_parallelism,
)
from lm_tuning.wording import count_of

if TYPE_CHECKING:
    from kedro.framework.context import KedroContext
    from kedro.io import CatalogProtocol
    from kedro.pipeline.node import Node

    from lm_tuning.parameters.groups import EnvironmentParameters

logger = logging.getLogger(__name__)

TORCH_TAG = "torch"
TOKENIZERS_TAG = "tokenizers"


class EnvironmentHook:
    """Set variables before torch is imported, and torch's switches before the first node that needs it."""

    def __init__(self) -> None:
        """Begin with nothing applied."""
        self._planned_kind: str | None = None
        self._settings: EnvironmentParameters | None = None
        self._applied: EnvironmentParameters | None = None
        self._open: dict[str, ExitStack] = {}

    @hook_impl(tryfirst=True)
    def after_context_created(self, context: KedroContext) -> None:
        """Set environment variables while torch is not loaded yet; the catalog may load it."""
        keep_log_lines_whole()
        settings = self._settings = settle_parameters(context).parameters.environment
        device = probe_device()
        self._set_variables(
            settings, device.kind, f"{device.kind.upper()} ({device.name}), {count_of(device.cores, 'core')}"
        )

    @hook_impl
    def before_node_run(self, node: Node, catalog: CatalogProtocol) -> None:
        """Switch parallel tokenizing on for nodes that tokenize, and set torch's switches before nodes that use it."""
        # The library reads its variable at each call, so it can be on for these nodes. A fork in the middle of its
        # thread pool hangs the child.
        if TOKENIZERS_TAG in node.tags:
            self._open[node.name] = stack = ExitStack()
            stack.enter_context(tokenizer_parallelism(True))
        if TORCH_TAG in node.tags:
            self._apply_backend(catalog)

    @hook_impl
    def after_node_run(self, node: Node) -> None:
        """Switch parallel tokenizing off again."""
        self._open.pop(node.name, ExitStack()).close()

    on_node_error = after_node_run

    def _set_variables(self, settings: EnvironmentParameters, kind: str, described: str) -> None:
        # Children inherit the variables: loader workers, ranks, and the process that measures micro-batches.
        processor = read_processor()
        decisions = plan_variables(
            device_kind=kind,
            cores=processor.num_cores,
            num_threads=settings.num_threads,
            reproducibility=settings.reproducibility,
            openmp=find_openmp(),
            vendor=processor.vendor,
            machine=processor.machine,
            extra=settings.variables,
        )
        apply_variables(decisions)
        self._planned_kind = kind
        if remember_decisions(decisions):
            _log(f"Environment for {described}:", summarize_decisions(decisions))

    def _apply_backend(self, catalog: CatalogProtocol) -> None:
        if self._settings is None:
            # A process that Kedro's parallel runner has started: it is given the catalog and no context.
            from lm_tuning.parameters.groups import EnvironmentParameters

            loaded: Any = catalog.load("params:environment")
            self._settings = EnvironmentParameters.model_validate(loaded)
        settings = self._settings
        if settings == self._applied:
            return
        import torch

        # The variables were planned by what the driver said. A card that torch cannot use turns this into a training on
        # the CPU, where one thread would be ruinous.
        if self._planned_kind == "cuda" and not torch.cuda.is_available():
            logger.warning(
                "The driver shows a graphics card, but torch %s cannot use it (see torch.cuda.is_available): training "
                "goes to the CPU, with as many threads as that needs.",
                torch.__version__,
            )
            self._set_variables(settings, "cpu", "CPU")
        facts = apply_backend(**settings.model_dump(exclude={"variables"}))
        self._applied = settings
        _log(f"torch {torch.__version__} reports:", summarize_facts(facts))


def _log(title: str, lines: list[str]) -> None:
    logger.info("%s", "\n".join([title, *lines]))
