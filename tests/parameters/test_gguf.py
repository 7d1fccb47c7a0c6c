"""Parameters of a GGUF that contradict each other."""

from __future__ import annotations

from typing import Any

import pytest

from lm_tuning.parameters.export import ExportParameters
from lm_tuning.parameters.gguf import find_gguf_contradictions


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        ({"gguf": {"quantization": "q8_0"}}, ("export.gguf.quantization", "export.format")),
        (
            {"format": "gguf", "dtype": "float16", "gguf": {"quantization": "q8_0"}},
            ("export.dtype", "export.gguf.quantization"),
        ),
        ({"format": "gguf", "register_as": "tiny"}, ("export.format", "export.register_as")),
        ({"format": "gguf", "log_to_mlflow": True}, ("export.format", "export.log_to_mlflow")),
    ],
)
def test_each_contradiction_names_its_keys(given: dict[str, Any], keys: tuple[str, str]) -> None:
    ((found, problem),) = find_gguf_contradictions(ExportParameters(**given))
    assert found == keys
    assert all(key in problem for key in keys)


@pytest.mark.parametrize("given", [{}, {"format": "gguf", "dtype": "float16"}, {"format": "adapter"}])
def test_what_agrees_is_let_through(given: dict[str, Any]) -> None:
    assert not list(find_gguf_contradictions(ExportParameters(**given)))
