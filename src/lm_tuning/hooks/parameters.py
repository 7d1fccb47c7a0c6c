"""The first hook of a session: nothing else starts before every parameter is known to be right."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from kedro.framework.hooks import hook_impl

from lm_tuning.datasets.options import check_entries
from lm_tuning.parameters.loading import read_settled

if TYPE_CHECKING:
    from kedro.framework.context import KedroContext

logger = logging.getLogger(__name__)


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
        os.chdir(context.project_path)
        settled = read_settled(context.config_loader, context.project_path)
        check_entries(context.config_loader)
        # What a nearer setting replaced must be gone for the nodes too, which Kedro hands the loader's values.
        context.config_loader["parameters"] = settled.raw
        for line in settled.replaced:
            logger.info("%s", line)
        for line in settled.warnings:
            logger.warning("%s", line)
