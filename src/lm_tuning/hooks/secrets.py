"""Keep secrets out of what other hooks and plugins write about a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kedro.framework.hooks import hook_impl

from lm_tuning.hooks.session_parameters import settle_parameters
from lm_tuning.secrets import mask_error, remember_settings

if TYPE_CHECKING:
    from kedro.framework.context import KedroContext


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

    @hook_impl(tryfirst=True)
    def on_pipeline_error(self, error: Exception) -> None:
        """Mask the message of an error that no node raised, such as one of a dataset."""
        mask_error(error)
