"""Quantization: what it is held in, and that those who do not quantize do not pay for it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from lm_tuning.models.quantization import _compile_when_called


def test_peft_is_imported_without_the_compiler() -> None:
    code = """
import sys, torch
from lm_tuning.models.quantization import import_bitsandbytes
compile_now = torch.compile
import_bitsandbytes()
import peft
assert torch.compile is compile_now
assert "bitsandbytes" in sys.modules
print("torch._inductor.compile_fx" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_model_is_set_up_without_the_compiler() -> None:
    code = """
import sys
from lm_tuning.training.setup.model import set_up_model
try:
    set_up_model(None)
except AttributeError:
    pass
import transformers.trainer_utils
assert "peft" in sys.modules
print("torch._inductor.compile_fx" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_function_is_compiled_once_when_it_is_called_first() -> None:
    asked: list[Any] = []

    def compile_now(function: Any, **options: Any) -> Any:
        asked.append((function.__name__, options))
        return lambda *arguments: function(*arguments) + 1

    def double(number: int) -> int:
        return 2 * number

    compiled = _compile_when_called(compile_now)(double, dynamic=False)
    assert not asked
    assert (compiled.__name__, compiled(2), compiled(3)) == ("double", 5, 7)
    assert asked == [("double", {"dynamic": False})]


@pytest.mark.parametrize("given", [torch.nn.Linear(1, 1), None])
def test_what_is_no_function_is_compiled_at_once(given: Any) -> None:
    asked: list[Any] = []
    _compile_when_called(lambda function, **_: asked.append(function))(given)
    assert asked == [given]
