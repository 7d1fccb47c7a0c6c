from __future__ import annotations

import json
import subprocess
import sys

import pytest

from lm_tuning.errors import UserError
from lm_tuning.preflight.figures import describe_preflight
from tests.preflight.conftest import Look, questions


def test_all_figures_go_into_a_json_file_and_the_numbers_to_tracking(look: Look):
    figures = look(questions(10), splitting={"test": 2})
    assert json.loads(json.dumps(figures)) == figures
    assert figures["metrics"] == {
        "data_supervised_fraction": 16 / 72,
        "data_tokens_per_row_mean": 9.0,
        "data_tokens_per_row_p99": 9.0,
        "data_tokens_per_row_max": 9.0,
        "data_rows_at_limit_fraction": 0.0,
        "data_padding_fraction_fixed": 1 - 9 / 64,
        "data_padding_fraction_longest_row": 0.0,
        "data_padding_fraction_random": 0.0,
        "data_padding_fraction_padded": 0.0,
        "data_padding_fraction_packed": 0.0,
        "data_steps_per_epoch": 4.0,
        "data_tokens_per_epoch": 72.0,
        "data_total_steps": 4.0,
        "data_total_tokens": 72.0,
        "data_end_learned_fraction": 1.0,
        "data_preflight_stops": 0.0,
        "data_preflight_warnings": 0.0,
    }


def test_the_log_tells_the_outcome(look: Look):
    lines = describe_preflight(look(questions(10), splitting={"test": 2}))
    assert lines == [
        "Preflight: 10 rows read, 8 trained on; 4 steps and 72 tokens per epoch, 4 steps in all; 22.2% of the tokens "
        "supervised; padding 0.0% (packed).",
        "Issues: 2 notes.",
        "All of it, with every example: preflight.html and preflight.md, beside the data report.",
    ]
    lines = describe_preflight(look(questions(10), splitting={"test": 2}, warmup_steps=4))
    assert lines[1:3] == [
        "Training would refuse to start, or be in vain; see the issues.",
        "Issues: 1 stop, 2 notes.",
    ]


def test_the_device_decides_how_steps_are_split(look: Look):
    padding = look(questions(4), device="cuda")["padding"]
    assert (padding["batching"], padding["micro_batch_tokens"]) == ("packed", 8192)
    padding = look(questions(4), device="cpu")["padding"]
    assert (padding["batching"], padding["micro_batch_tokens"]) == ("packed", 512)


def test_tokens_of_other_splits_are_refused(look: Look):
    with pytest.raises(UserError, match=r"made from other splits \(s0\) than the present ones \(s1\)"):
        look(questions(4), made_from="s0")


def test_looking_imports_no_torch():
    program = (
        "import lm_tuning.preflight.figures, lm_tuning.preflight.report, lm_tuning.reporting.html, sys\n"
        "import lm_tuning.reporting.markdown, lm_tuning.reporting.terminal, lm_tuning.pipelines.preflight\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
