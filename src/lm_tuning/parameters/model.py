"""Parameters of the base model and of the environment it runs in."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lm_tuning.parameters.base import AutoOrCount, Dtype, ParameterGroup, PathText, Text


class ModelParameters(ParameterGroup):
    """Which pretrained model is tuned, and how its weights are held."""

    name_or_path: PathText = "data/06_models/base/SmolLM2-135M-Instruct"
    """Folder in the Hugging Face layout, or a name on the model hub."""

    revision: Text | None = None
    """Branch, tag or commit on the hub; null takes the main branch. A folder has none."""

    dtype: Dtype = "auto"
    """Dtype of the weights in memory; auto chooses by device and method and says what it chose."""

    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention implementation; auto takes the fastest that the device and the installed packages have."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model: only for models whose code has been read."""


# Read by the hook before torch is imported, so nothing in here may need it.
class EnvironmentParameters(ParameterGroup):
    """Threads, matrix precision and determinism: what decides speed before the first step."""

    num_threads: AutoOrCount = "auto"
    """CPU threads of one operation; auto takes every core for training on a CPU and few beside a GPU."""

    tf32: bool = True
    """Multiply float32 matrices in TF32 on NVIDIA cards since Ampere: 10 bits of mantissa, several times faster."""

    flash_sdp: bool = True
    """Allow the flash kernel of scaled dot product attention."""

    mem_efficient_sdp: bool = True
    """Allow the memory-efficient kernel of scaled dot product attention."""

    reproducibility: Literal["fast", "deterministic"] = "fast"
    """Fast lets cuDNN try algorithms; deterministic repeats a run bit by bit on the same machine, more slowly."""

    variables: dict[str, str] = Field(default={})
    """More environment variables, name to text; a variable that is already set in the shell wins."""
