"""What MLflow notes of every run is the same without looking for a notebook where there is none."""

from __future__ import annotations

import subprocess
import sys


def test_tags_are_those_of_mlflow_without_ipython() -> None:
    code = """
import sys
from lm_tuning.hooks.mlflow_run import _context_tags
ours = _context_tags("name")
assert "IPython" not in sys.modules
from mlflow.tracking.context.registry import resolve_tags
assert ours == resolve_tags({"mlflow.runName": "name"}), ours
import IPython
from lm_tuning.hooks.mlflow_run import _notebook_contexts
assert _notebook_contexts() == []
"""
    subprocess.run([sys.executable, "-c", code], check=True)
