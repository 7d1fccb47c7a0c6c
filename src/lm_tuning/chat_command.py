"""What ``kedro chat`` does: read the configuration as a run does, load the models, and talk."""

from __future__ import annotations

import logging
from pathlib import Path

from lm_tuning.json_types import JsonObject


def chat_with_models(
    root: Path, env: str | None, params: JsonObject, *, who: str, system: str | None, max_new_tokens: int | None
) -> None:
    """Talk to the tuned model of an environment, to its base, or to both.

    Args:
        root: the project.
        env: environment; ``None`` for the usual one.
        params: parameters on top.
        who: ``tuned``, ``base`` or ``both``.
        system: what stands before all questions; ``None`` for nothing.
        max_new_tokens: longest answer; ``None`` for that of ``generate.generation``.

    Raises:
        UserError: wrong parameters, or no tuned model that can be talked to.
    """
    from kedro.framework.session import KedroSession

    from lm_tuning.hooks.parameters import settle_parameters

    # Warnings stay; what a run logs of its steps would stand between the turns.
    logging.disable(logging.INFO)
    with KedroSession.create(project_path=root, env=env, runtime_params=params) as session:
        # Its hooks check the parameters and set threads, as for a run.
        context = session.load_context()  # type: ignore[attr-defined]  # of the kind that create() makes
        parameters = settle_parameters(context).parameters
        tuned_folder: Path = context.catalog.load("tuned_model")
    from lm_tuning.answering.chat import open_chat
    from lm_tuning.answering.terminal import talk
    from lm_tuning.runtime.backend import apply_backend

    apply_backend(**parameters.environment.model_dump(exclude={"variables"}))
    talk(open_chat(tuned_folder, parameters, who=who, system=system, max_new_tokens=max_new_tokens))
