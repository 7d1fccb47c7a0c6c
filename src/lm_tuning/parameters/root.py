"""The root of all parameters."""

from __future__ import annotations

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from lm_tuning.parameters.conflicts import find_conflicts
from lm_tuning.parameters.groups import ParameterGroups


class Parameters(ParameterGroups):
    """All parameters of a run, checked one by one and against each other."""

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> Parameters:
        """Check the groups against each other, reporting every conflict at once."""
        conflicts = find_conflicts(self)
        if conflicts:
            text = "\n".join(conflict.problem for conflict in conflicts)
            raise PydanticCustomError("conflicting_parameters", "{text}", {"text": text, "conflicts": conflicts})
        return self
