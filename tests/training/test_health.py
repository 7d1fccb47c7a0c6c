"""Health: a planted fault is found and its cause named; a sound run raises nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lm_tuning
from lm_tuning.batching.losses import PLAIN
from lm_tuning.batching.step_loader import StepDataset
from lm_tuning.errors import UserError
from lm_tuning.parameters.health_codes import CODES
from lm_tuning.text.records import TokenRow
from lm_tuning.training.health import first_loss
from lm_tuning.training.health.first_loss import ExpectedFirstLoss, check_first_step, check_layout
from lm_tuning.training.health.first_step import mark_supervised
from lm_tuning.training.health.report import Finding, HealthReport, stop_if_needed, telling_refusals
from lm_tuning.training.run import TrainingPaths, TrainingSettings, run_training
from lm_tuning.training.trainer import StepPlanTrainer
from tests.support.settings import vary
from tests.support.tiny import ASSISTANT, END, USER, ids, make_tokenizer


def finding(code: str, measured: str = "a fault", **options: Any) -> Finding:
    return Finding(code=code, measured=measured, expected="none", cause="Chance.", change="Look.", **options)


# The report


def test_a_finding_takes_the_severity_of_its_code() -> None:
    assert finding("pad-is-eos").severity == "note"
    assert finding("gradient-zero").severity == "warn"
    assert finding("first-loss-off").severity == "stop"
    assert finding("first-loss-off", severity="warn").severity == "warn"


def test_what_the_user_says_of_a_code_comes_first(caplog: pytest.LogCaptureFixture) -> None:
    report = HealthReport(
        severities={"pad-is-eos": "stop", "first-loss-off": "off", "gradient-zero": "note", "bos-doubled": "warn"}
    )
    with caplog.at_level("INFO"):
        for known in (
            finding("pad-is-eos"),
            finding("first-loss-off", severity="stop"),
            finding("gradient-zero", severity="stop"),
            finding("bos-doubled"),
        ):
            report.add(known)
    assert [(known.code, known.severity) for known in report.findings] == [
        ("pad-is-eos", "stop"),
        ("gradient-zero", "note"),
        ("bos-doubled", "warn"),
    ]
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO", "WARNING"]
    with pytest.raises(UserError) as stopped:
        stop_if_needed(report)
    assert stopped.value.problems == [
        "Training was stopped by its health check:",
        "[pad-is-eos] a fault; expected none. Chance. Look.",
    ]


def test_a_later_count_takes_the_place_of_the_first(caplog: pytest.LogCaptureFixture) -> None:
    report = HealthReport(severities={"gradient-zero": "note", "bos-doubled": "off"})
    report.add(finding("gradient-zero", "one"))
    caplog.clear()
    report.revise(finding("gradient-zero", "two"))
    report.revise(finding("bos-doubled"))
    assert [(known.measured, known.severity) for known in report.findings] == [("two", "note")]
    assert report.has("gradient-zero")
    assert not report.has("bos-doubled")
    assert not caplog.records
    report.revise(finding("pad-is-eos"))
    assert report.has("pad-is-eos")


def test_a_report_comes_back_from_its_file() -> None:
    report = HealthReport(facts={"rows": 3}, seconds=1.23456)
    report.add(finding("pad-is-eos"))
    stored = json.loads(json.dumps(report.to_json()))
    assert stored["facts"] == {"rows": 3}
    assert stored["seconds"] == 1.235
    assert [Finding(**known) for known in stored["findings"]] == report.findings


@pytest.mark.parametrize("is_resume", [False, True])
def test_a_run_that_is_refused_early_leaves_its_report_and_a_refused_resume_none(is_resume: bool) -> None:
    reports: list[dict[str, Any]] = []
    with (
        pytest.raises(UserError, match="too long"),
        telling_refusals(reports.append, run_id="r1", is_resume=is_resume),
    ):
        raise UserError("rows are too long")
    states = [(report["run"]["mlflow_run_id"], report["run"]["state"]) for report in reports]
    assert states == ([] if is_resume else [("r1", "refused")])
    with telling_refusals(reports.append, run_id="r1", is_resume=is_resume):
        pass
    assert len(reports) == len(states)


def test_trouble_with_the_report_ends_no_run_and_hides_no_error(caplog: pytest.LogCaptureFixture) -> None:
    def fail(report: dict[str, Any]) -> None:
        if len(report["findings"]):
            raise OSError("the disk is away")

    report = HealthReport(on_change=fail)
    with pytest.raises(ZeroDivisionError), report.closing():
        report.begin()
        report.add(finding("pad-is-eos"))
        raise ZeroDivisionError
    assert caplog.text.count("The health report could not be written: the disk is away") == 2
    assert (report.run.state, report.run.ended_by) == ("failed", "ZeroDivisionError")


def test_every_code_in_use_is_in_the_table_and_every_code_of_the_table_in_use() -> None:
    folder = Path(lm_tuning.__file__).parent
    sources = [path.read_text() for path in folder.rglob("*.py") if path.name != "health_codes.py"]
    used = {code for source in sources for code in re.findall(r'\bcode="([a-z0-9-]+)"', source)}
    assert used <= set(CODES)
    assert {code for code in CODES if not any(f'"{code}"' in source for source in sources)} == set()
    for code, known in CODES.items():
        assert known.code == code
        assert known.severity in {"note", "warn", "stop"}
        assert known.meaning


def test_the_table_of_codes_needs_nothing_heavy() -> None:
    code = "import sys, lm_tuning.parameters.health_codes as c; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# The first loss


def test_rounding_near_zero_is_no_finding() -> None:
    assert check_first_step(0.02, 0.028, tolerance=0.05, num_micro_batches=4) is None
    assert check_first_step(0.02, 0.08, tolerance=0.05, num_micro_batches=4) is not None


def test_equal_losses_are_no_finding() -> None:
    assert check_first_step(5.63, 5.64, tolerance=0.05, num_micro_batches=12) is None


@pytest.mark.parametrize(
    ("logged", "words"),
    [
        (5.63 * 12, "equal to the 12 micro-batches of a step:"),
        (5.63 * 2, "equal to the 2 ranks"),
        (5.63 * 24, "12 micro-batches of a step times 2 ranks"),
        (5.63 / 12, "divided twice"),
        (float("nan"), "not a number"),
        (5.63 * 3.3, "not one of the known"),
    ],
)
def test_the_cause_of_a_wrong_first_loss_is_named(logged: float, words: str) -> None:
    finding = check_first_step(5.63, logged, tolerance=0.05, num_micro_batches=12, num_ranks=2)
    assert finding is not None
    assert finding.code == "first-loss-off"
    assert words in finding.sentence()


def test_the_classifier_that_began_it_all_is_explained() -> None:
    """280 classes, 12 micro-batches: 67.8 was logged where 5.65 was due."""
    finding = check_first_step(
        5.65, 67.8, tolerance=0.05, num_micro_batches=12, unit="row", fresh_head_classes=280, severity="stop"
    )
    assert finding is not None
    assert finding.measured == "step 1 logged 67.8000 nats per row (12 times the measured loss)"
    assert finding.expected == (
        "5.6500 ± 5%, from a plain forward pass over the same rows, and log(280) = 5.63 of a new head"
    )
    assert finding.cause == (
        "The loss is off by a factor of 12, equal to the 12 micro-batches of a step: a model or custom loss that "
        "returns a mean over its micro-batch must not be added up, as if it were divided by the rows of the whole step "
        "already."
    )
    assert finding.change == "Whatever changed the loss or the training step must divide by the step's row count."


def test_six_micro_batches_on_two_ranks_are_told_from_twelve_on_one() -> None:
    finding = check_first_step(5.65, 67.8, tolerance=0.05, num_micro_batches=6, num_ranks=2)
    assert finding is not None
    assert "equal to the 6 micro-batches of a step times 2 ranks: a model or custom loss" in finding.cause


def test_the_nearest_factor_is_named_when_dropout_allows_for_much() -> None:
    finding = check_first_step(5.0, 5.0 * 2.1, tolerance=0.25, num_micro_batches=3, num_ranks=2)
    assert finding is not None
    assert "equal to the 2 ranks" in finding.cause
    one = check_first_step(5.0, 12.0, tolerance=0.05, num_micro_batches=1)
    assert one is not None
    assert "not one of the known" in one.cause


def test_a_training_step_that_adds_up_means_stops_with_its_cause(
    paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = StepPlanTrainer.micro_batch_loss

    def add_up_means(self: StepPlanTrainer, model: Any, micro_batch: Any, total: int) -> torch.Tensor:
        return sound(self, model, micro_batch, micro_batch.num_supervised)

    monkeypatch.setattr(StepPlanTrainer, "micro_batch_loss", add_up_means)
    cut = vary(settings, batching="packed", micro_batch_tokens=1)
    with pytest.raises(UserError, match=r"first-loss-off.*the 6 micro-batches of a step"):
        run_training(paths, vary(cut, health={"tolerance_fraction": 0.03}))
    result = run_training(paths, vary(cut, health={"on_mismatch": "warn"}))
    assert [finding["code"] for finding in result.health["findings"]] == ["first-loss-off"]


@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["by the first step", "before it, since dropout blurs the step"])
def test_rows_that_see_each_other_stop_the_run_before_the_weights_change(
    paths: TrainingPaths, settings: TrainingSettings, monkeypatch: pytest.MonkeyPatch, dropout: float
) -> None:
    sound = StepDataset.__getitem__
    steps_of_the_optimizer = []

    def forget_borders(self: StepDataset, step: int) -> Any:
        batch = sound(self, step)
        for micro_batch in batch.micro_batches:
            micro_batch.position_ids = micro_batch.row_bounds = None
        return batch

    monkeypatch.setattr(StepDataset, "__getitem__", forget_borders)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *_, **__: steps_of_the_optimizer.append(1))
    # A random model hardly looks at its neighbours; any difference beyond rounding is one too many here.
    monkeypatch.setattr("lm_tuning.training.health.first_loss.ROUNDING_NATS", 1e-6)
    monkeypatch.setattr(
        first_loss,
        "check_layout",
        lambda plain, path, *, tolerance, batching: check_layout(plain, path, tolerance=1e-6, batching=batching),
    )
    packed = vary(settings, batching="packed", micro_batch_tokens=1000, health={"tolerance_fraction": 1e-6})
    with pytest.raises(UserError, match=r"layout-changes-loss.*Packed rows see each other.*train.batching=padded"):
        run_training(paths, vary(packed, lora={**settings.train.lora.model_dump(), "dropout": dropout}))
    assert not steps_of_the_optimizer


def test_a_sound_run_has_facts_and_no_stop(paths: TrainingPaths, settings: TrainingSettings) -> None:
    health = run_training(paths, settings).health
    assert [finding for finding in health["findings"] if finding["severity"] != "note"] == []
    facts = health["facts"]
    assert facts["untrained_head_nats_per_token"] == pytest.approx(4.6444, abs=1e-4)  # log(104)
    assert facts["first_step_logged_nats_per_token"] == pytest.approx(
        facts["first_step_measured_nats_per_token"], rel=1e-5
    )
    assert facts["pad_is_eos"] is False
    assert facts["rows_that_teach_the_end_fraction"] == 1.0
    assert facts["first_step_rows"] == 6
    assert "⟦" in facts["first_example"]


@pytest.mark.parametrize(
    ("changes", "factor", "ending"),
    [
        ({}, 1.0, r", as measured before it \((\d+\.\d{4})\)\."),
        (
            {},
            1.01,
            r", (\d+\.\d{4}) was measured before it\. The difference \(1\.0%\) is within "
            r"train\.health\.tolerance_fraction = 0\.05\.",
        ),
        (
            {"neftune_noise_alpha": 0.01},
            1.01,
            r", (\d+\.\d{4}) was measured before it\. The difference \([^)]*%\) is within the 25% allowed for the "
            r"noise of NEFTune\.",
        ),
    ],
    ids=["the same", "by a constant", "with noise"],
)
def test_a_first_loss_that_differs_is_not_called_as_measured(
    paths: TrainingPaths,
    settings: TrainingSettings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    changes: dict[str, Any],
    factor: float,
    ending: str,
) -> None:
    sound = StepPlanTrainer.micro_batch_loss
    monkeypatch.setattr(StepPlanTrainer, "micro_batch_loss", lambda *given, **more: factor * sound(*given, **more))
    with caplog.at_level("INFO"):
        run_training(paths, vary(settings, max_steps=1, **changes))
    found = re.search(r"Step 1 logged (\d+\.\d{4}) nats per token" + ending, caplog.text)
    assert found, caplog.text
    assert (found[1] == found[2]) == (factor == 1.0)


def test_noise_and_rounding_are_named_where_they_explain_a_difference() -> None:
    def said(logged: float, nats: float, tolerance: float, *noise: str) -> str:
        steps: Any = SimpleNamespace(task=SimpleNamespace(unit="row"))
        settings: Any = None
        expected = ExpectedFirstLoss(steps, settings, PLAIN, nats, tolerance, None, noise=noise)
        return expected.describe_agreement(logged).partition("is within ")[2]

    assert said(1.1, 1.0, 0.25, "dropout") == "the 25% allowed for dropout."
    both = "the 25% allowed for dropout and the noise of NEFTune."
    assert said(1.1, 1.0, 0.25, "dropout", "the noise of NEFTune") == both
    assert said(0.008, 0.002, 0.05) == "train.health.tolerance_fraction = 0.05 and 0.01 nats for rounding."
    assert said(0.008, 0.0, 0.05) == "train.health.tolerance_fraction = 0.05 and 0.01 nats for rounding."
    assert said(1.3, 1.0, 0.4, "dropout") == "train.health.tolerance_fraction = 0.4.", "the user's own, which is larger"


def test_the_supervised_part_is_marked() -> None:
    import numpy as np

    tokens = [USER, *ids("hi"), END, ASSISTANT, *ids("yo"), END]
    row = TokenRow(row_id=1, input_ids=np.array(tokens, dtype=np.int32), spans=[(5, 8)])
    assert mark_supervised(make_tokenizer(), row) == "<|user|>hi<|end|><|assistant|>⟦yo<|end|>⟧"
