"""The figures of a comparison, and what they decide."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from lm_tuning.errors import MachineFault, UserError
from lm_tuning.export import parity, plain_check
from lm_tuning.export.parity import describe_distance, judge, require_bounds
from lm_tuning.export.plain_check import Sums
from lm_tuning.parameters.export import ParityParameters


def make_sums(reference: torch.Tensor, exported: torch.Tensor, targets: torch.Tensor) -> Sums:
    sums = Sums()
    # In two parts, as rows come one by one.
    sums.add(reference[:50], exported[:50], targets[:50])
    sums.add(reference[50:], exported[50:], targets[50:])
    return sums


def test_figures_are_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(80, 30, generator=generator) * 3
    exported = reference + 0.1 * torch.randn(80, 30, generator=generator)
    targets = torch.randint(30, (80,), generator=generator)
    found = describe_distance(make_sums(reference, exported, targets))
    losses = [float(functional.cross_entropy(each.double(), targets)) for each in (reference, exported)]
    divergence = functional.kl_div(
        exported.double().log_softmax(-1), reference.double().log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert found["num_predictions"] == 80
    assert [found["reference_nats"], found["exported_nats"]] == pytest.approx(losses)
    assert found["loss_change_fraction"] == pytest.approx(abs(losses[1] - losses[0]) / losses[0])
    assert found["mean_kl_nats"] == pytest.approx(float(divergence))
    agreed = (reference.argmax(-1) == exported.argmax(-1)).float().mean()
    assert found["top_1_agreement"] == pytest.approx(float(agreed))
    assert 0.5 < found["top_1_agreement"] < 1
    deviation = reference.double().std(correction=0)
    assert found["max_logit_difference"] == pytest.approx(float((reference - exported).abs().max() / deviation))


def test_a_nan_of_an_export_is_never_within_a_bound() -> None:
    reference = torch.randn(80, 30)
    exported = reference.clone()
    exported[3, 4] = math.nan
    distance = describe_distance(make_sums(reference, exported, torch.zeros(80, dtype=torch.int64)))
    assert not any(bound["is_met"] for bound in judge(distance, ParityParameters(), is_exact=True))
    names = {bound["name"] for bound in judge(distance, ParityParameters(), is_exact=False) if not bound["is_met"]}
    assert {"loss_change_fraction", "mean_kl_nats"} <= names


def distance(**changes: Any) -> Any:
    same = {
        "num_predictions": 1000,
        "reference_nats": 2.0,
        "exported_nats": 2.0,
        "loss_change_fraction": 0.0,
        "mean_kl_nats": 0.0,
        "top_1_agreement": 1.0,
        "max_logit_difference": 0.0,
    }
    return same | changes


@pytest.mark.parametrize(
    ("changes", "is_exact", "missed"),
    [
        ({"max_logit_difference": 1e-4}, True, []),
        ({"max_logit_difference": 1.1e-4}, True, ["max_logit_difference"]),
        ({"max_logit_difference": 0.5}, False, []),
        ({"loss_change_fraction": 0.0021}, False, ["loss_change_fraction"]),
        ({"mean_kl_nats": 1.1e-3}, False, ["mean_kl_nats"]),
        ({"top_1_agreement": 0.989}, False, ["top_1_agreement"]),
        ({"top_1_agreement": 0.99, "mean_kl_nats": 1e-3, "loss_change_fraction": 0.002}, False, []),
    ],
)
def test_bounds_are_those_of_the_parameters(changes: dict[str, float], is_exact: bool, missed: list[str]) -> None:
    bounds = judge(distance(**changes), ParityParameters(), is_exact=is_exact)
    assert [bound["name"] for bound in bounds if not bound["is_met"]] == missed


def test_a_missed_bound_is_told_with_figures_and_parameters() -> None:
    found = distance(mean_kl_nats=0.5, top_1_agreement=0.25, exported_nats=2.5)
    record: Any = {
        "split": "test",
        "num_rows": 64,
        "reference": "the tuned model in float32",
        "distance": found,
        "bounds": judge(found, ParityParameters(), is_exact=False),
        "dtype": "bfloat16",
    }
    with pytest.raises(UserError) as caught:
        require_bounds(record)
    text = str(caught.value)
    for part in (
        "mean_kl_nats is 0.5 (export.parity.max_kl_nats = 0.001)",
        "top_1_agreement is 0.25 (export.parity.min_top_1_agreement = 0.99)",
        "1,000 predictions of 64 rows of the test split",
        "2.50000 nats against 2.00000",
        "An earlier export is kept",
    ):
        assert part in text


class TestTheProcess:
    def run(self, monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> None:
        script = folder / "script.py"
        script.write_text(code)
        monkeypatch.setattr(plain_check, "__file__", str(script))
        parity.run_check({}, folder)  # type: ignore[typeddict-item]

    def test_its_last_words_are_told(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"cannot be used by transformers alone.*: ValueError: no such weights"):
            self.run(monkeypatch, tmp_path, "raise ValueError('no such weights')")

    def test_an_earlier_result_is_not_taken_for_its_own(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "result.json").write_text("{}")
        with pytest.raises(UserError, match="it said nothing"):
            self.run(monkeypatch, tmp_path, "pass")

    def test_a_killed_one_is_told(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        with pytest.raises(MachineFault, match="ended by signal 9"):
            self.run(monkeypatch, tmp_path, "import os; os.kill(os.getpid(), 9)")

    def test_it_imports_nothing_of_this_project(self) -> None:
        code = f"import runpy, sys; runpy.run_path({plain_check.__file__!r}); print('lm_tuning' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "False"
