"""Plots of scores can be written, whatever a score of the project's own is called."""

from __future__ import annotations

import io

import numpy as np

from lm_tuning.evaluation.score_plots import draw_scores
from lm_tuning.evaluation.statistics.outcomes import judge_scores
from lm_tuning.evaluation.statistics.scored_rows import mean_of_rows


def test_a_title_with_dollars_is_no_formula() -> None:
    values, rows = np.random.default_rng(0).random((2, 40)), np.arange(40)
    base, tuned = (mean_of_rows("own.cost", each, rows, title=r"between $x_{ and $y") for each in values)
    scored = {"own.cost": (base, tuned)}
    written = io.BytesIO()
    draw_scores(judge_scores(scored, seed=1), scored)["scores"].savefig(written, format="svg")
    assert written.getvalue()
