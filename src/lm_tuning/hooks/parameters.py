"""The parameters of a session: read and checked once, whichever hook asks first, and their secrets kept from others."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from kedro.framework.hooks import hook_impl

from lm_tuning.datasets.options import check_entries
from lm_tuning.parameters.loading import Settled, read_settled
from lm_tuning.secrets import mask_error, remember_settings

if TYPE_CHECKING:
    from kedro.framework.context import KedroContext

logger = logging.getLogger(__name__)

_ATTRIBUTE = "settled_parameters"


def settle_parameters(context: KedroContext) -> Settled:
    """Return what the configuration of a session comes to; files are read and checked at the first call only.

    Args:
        context: of the session. It keeps the answer, so another session in the same process reads its files again.

    Raises:
        UserError: with every problem at once, see :func:`lm_tuning.parameters.loading.read_settled`.
    """
    settled: Settled | None = getattr(context, _ATTRIBUTE, None)
    if settled is None:
        settled = read_settled(context.config_loader, context.project_path)
        setattr(context, _ATTRIBUTE, settled)
    return settled


class ParametersHook:
    """Check all parameters, also those that the requested pipelines do not use."""

    @hook_impl(tryfirst=True)
    def after_context_created(self, context: KedroContext) -> None:
        """Validate the merged parameters and make relative paths mean the project folder.

        Kedro validates only the ``params:`` inputs of nodes that run, and only later, when it builds the catalog. A
        missing environment folder is found here too: left alone it ends in a misleading message from a later plugin.

        Raises:
            UserError: with every problem at once.
        """
        # Kedro runs from any folder inside the project, and catalog entries and parameters hold relative paths.
        os.chdir(context.project_path)
        settled = settle_parameters(context)
        check_entries(context.config_loader)
        # What a nearer setting replaced must be gone for the nodes too, which Kedro hands the loader's values.
        context.config_loader["parameters"] = settled.raw
        for line in settled.replaced:
            logger.info("%s", line)
        for line in settled.warnings:
            logger.warning("%s", line)


class SecretsHook:
    """Learn what is secret in the parameters, and mask it in errors before anybody else sees them."""

    @hook_impl(tryfirst=True)
    def after_context_created(self, context: KedroContext) -> None:
        """Remember passwords in addresses and variables whose names say that they are secret."""
        remember_settings(settle_parameters(context).parameters.model_dump())

    @hook_impl(tryfirst=True)
    def on_node_error(self, error: Exception) -> None:
        """Mask the message of an error, which the plugin of kedro viz writes to a file, for one."""
        mask_error(error)

    on_pipeline_error = on_node_error  # of an error that no node raised, such as one of a dataset
