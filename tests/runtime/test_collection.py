"""How often Python looks for reference cycles."""

from __future__ import annotations

import gc
import subprocess
import sys

from lm_tuning.runtime.threads import collect_rarely, restore_collection


def test_collection_is_rare_and_comes_back() -> None:
    restore_collection()
    usual = gc.get_threshold()
    collect_rarely()
    assert gc.isenabled()
    assert gc.get_threshold()[0] > usual[0]
    restore_collection()
    assert gc.get_threshold() == usual


def test_reading_the_settings_makes_it_rare() -> None:
    code = "import gc; usual = gc.get_threshold(); import lm_tuning.settings; assert gc.get_threshold() > usual"
    subprocess.run([sys.executable, "-c", code], check=True)
