"""The parameters of a session: read and checked once, whichever hook asks first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lm_tuning.parameters.loading import Settled, read_settled

if TYPE_CHECKING:
    from kedro.framework.context import KedroContext

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
