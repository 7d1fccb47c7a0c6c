"""A classifier is compared with the majority class of its training rows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm_tuning.batching.class_predictions import Predictions
from lm_tuning.errors import UserError
from lm_tuning.evaluation.class_errors import MAX_WRONG_ROWS, SAMPLE_COLUMNS, choose_samples, sort_out
from lm_tuning.evaluation.report import describe_outcome
from lm_tuning.evaluation.results import Comparison, evaluate_models
from lm_tuning.storage.folders import FolderStore
from lm_tuning.text.store.table import TokenTable, open_split
from lm_tuning.tracking.run_description import numbers_of
from tests.evaluation.reports import as_markdown, on_terminal
from tests.support.rounding import SAME_LOSS
from tests.support.stored import evaluation_settings
from tests.support.tiny import ids, make_model
from tests.support.tiny_tasks import (
    LABEL_MAP,
    make_classifier,
    save_base,
    save_tuned_task,
    write_labelled,
)

NAMES = list(LABEL_MAP)
TRAIN_LABELS = [1, 1, 1, 0, 2, 3]
TEST_LABELS = [0, 1, 2, 3, 1, 0, 2, 2, 1, 3, 0]
TEXTS = [f"text {'and more ' * (number % 5)}{number}" for number in range(len(TEST_LABELS))]


def store_tokens(root: Path, *, train: list[int], test: list[int], key: str = "key1") -> Path:
    store = FolderStore(root)
    staged = store.stage(key)
    for split, labels in (("train", train), ("validation", []), ("test", test)):
        rows = [(ids(text), label) for text, label in zip(TEXTS, labels, strict=False)]
        write_labelled(rows, staged.path / f"{split}.arrow")
    return store.publish(staged)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return store_tokens(tmp_path / "tokens", train=TRAIN_LABELS, test=TEST_LABELS)


@pytest.fixture
def tuned(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    method = getattr(request, "param", "full")
    base = save_base(make_model(), tmp_path / "base")
    model = make_classifier()
    if method == "lora":
        # What is not in the adapter must be the base's.
        model.model.load_state_dict(make_model().model.state_dict())
    return save_tuned_task(
        tmp_path / "tuned",
        base,
        model,
        method,
        "sequence_classification",
        tokens_key="key1",
        label_map=LABEL_MAP,
    )


def compare(tuned: Path, tokens: Path, cache: Path, **changes: Any) -> Comparison:
    settings = {
        "num_samples": 3,
        **changes,
    }
    return evaluate_models(tuned, tokens, FolderStore(cache), evaluation_settings(**settings))


def by_hand(tuned: Path, table: TokenTable) -> torch.Tensor:
    """Return the log-probabilities of the classes of each row alone, by the model that was stored."""
    from lm_tuning.models.tuned import load_tuned

    model = load_tuned(tuned)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    rows = []
    for row in table:
        with torch.no_grad():
            hidden = inner.model(torch.tensor(row.input_ids.astype(np.int64))[None]).last_hidden_state
            rows.append(torch.log_softmax(inner.score(hidden[0, -1]).double(), -1))
    return torch.stack(rows)


@pytest.mark.parametrize("tuned", ["lora", "full"], indirect=True)
def test_the_classifier_is_measured_as_by_hand(tuned: Path, tokens: Path, tmp_path: Path) -> None:
    compared = compare(tuned, tokens, tmp_path / "cache")
    result = compared.result
    log_probabilities = by_hand(tuned, open_split(tokens, "test"))
    chosen = log_probabilities.argmax(-1).tolist()
    right = sum(one == other for one, other in zip(chosen, TEST_LABELS, strict=True))

    assert (result["task"], result["split"]) == ("sequence_classification", "test")
    assert (result["num_rows"], result["num_split_rows"]) == (11, 11)
    nats = -float(log_probabilities[range(11), TEST_LABELS].mean())
    assert result["tuned"]["nats_per_row"] == pytest.approx(nats, rel=SAME_LOSS)
    assert result["tuned"]["accuracy"] == pytest.approx(right / 11)
    # Class 1 has half of the training rows; 3 of 11 test rows are of it; the other three classes have a sixth each.
    assert result["base"]["class"] == NAMES[1]
    assert result["base"]["accuracy"] == pytest.approx(3 / 11)
    assert result["base"]["macro_f1"] == pytest.approx((2 * 3 / (3 + 11)) / 4)
    assert result["base"]["nats_per_row"] == pytest.approx((3 * math.log(2) + 8 * math.log(6)) / 11)
    assert result["improvement"]["accuracy_difference"] == pytest.approx((right - 3) / 11)
    assert result["improvement"]["nats_per_row_fraction"] == pytest.approx(
        1 - nats / result["base"]["nats_per_row"], abs=2 * SAME_LOSS
    )
    assert sum(line["num_rows"] for line in result["per_class"]) == 11
    assert sum(line["num_predicted"] for line in result["per_class"]) == 11
    occurring = [line["f1"] for line in result["per_class"]]
    assert result["tuned"]["macro_f1"] == pytest.approx(sum(occurring) / len(occurring))
    assert sum(line["num_rows"] for line in result["confusions"]) == 11 - right
    assert (result["tuned_method"], result["tokens_key"], result["skipped"]) == (
        json.loads((tuned / "tuning.json").read_text())["method"],
        "key1",
        None,
    )
    json.dumps(result, allow_nan=False)


def test_samples_are_the_wrong_rows_and_some_right_ones(tuned: Path, tokens: Path, tmp_path: Path) -> None:
    compared = compare(tuned, tokens, tmp_path / "cache")
    log_probabilities = by_hand(tuned, open_split(tokens, "test"))
    assert compared.columns == SAMPLE_COLUMNS
    assert sorted(row["row_id"] for row in compared.answers) == list(range(100, 111)), "few rows: all are kept"
    for row in compared.answers:
        index = row["row_id"] - 100
        assert tuple(row) == SAMPLE_COLUMNS
        assert row["text"] == TEXTS[index]
        assert row["reference"] == NAMES[TEST_LABELS[index]]
        assert row["base"] == NAMES[1]
        assert row["tuned"] == NAMES[int(log_probabilities[index].argmax())]
        assert row["probability"] == pytest.approx(float(log_probabilities[index].max().exp()), rel=SAME_LOSS)
    is_wrong = [row["reference"] != row["tuned"] for row in compared.answers]
    num_wrong = sum(is_wrong)
    assert 0 < num_wrong < 11
    assert is_wrong == [True] * num_wrong + [False] * (11 - num_wrong)
    sure = [row["probability"] for row in compared.answers[:num_wrong]]
    assert sure == sorted(sure, reverse=True)
    assert [row["reference"] == row["tuned"] for row in compared.result["samples"]] == [False, False, True]


def test_figures_do_not_depend_on_the_batch(tuned: Path, tokens: Path, tmp_path: Path) -> None:
    results = [
        compare(tuned, tokens, tmp_path / "cache", micro_batch_tokens=size).result["tuned"]
        for size in (1, 3 * len(TEXTS[0]), "auto")
    ]
    for result in results:
        assert result.pop("top_k_accuracy") is None, "four classes have no top 5"
    for result in results[1:]:
        assert result == pytest.approx(results[0], rel=SAME_LOSS)


def test_numbers_by_class_are_kept_out_of_the_metrics(tuned: Path, tokens: Path, tmp_path: Path) -> None:
    metrics = numbers_of(compare(tuned, tokens, tmp_path / "cache", top_k=2, abstain_below=0.5).result)
    scores = ("accuracy", "macro_f1", "micro_f1", "weighted_f1", "top_k_accuracy")
    assert {name for name in metrics if not name.startswith("intervals.")} == {
        "num_rows",
        "num_split_rows",
        "num_train_rows",
        "num_likely_mislabelled",
        *(f"{model}.{name}" for model in ("base", "tuned") for name in (*scores, "nats_per_row")),
        *(f"tuned.{name}" for name in ("calibration_error", "mean_probability")),
        *(f"improvement.{name}_difference" for name in scores),
        "abstaining.abstain_below",
        "abstaining.num_answered",
        "abstaining.answered_fraction",
        "abstaining.accuracy",
        "abstaining.wrong_rows_left_out_fraction",
        "abstaining.right_rows_left_out_fraction",
        *(f"best_constant.{name}" for name in ("accuracy", "macro_f1")),
        *(f"{constant}.num_tied_classes" for constant in ("base", "best_constant")),
        "improvement.nats_per_row_fraction",
    }


def test_a_part_of_the_rows_is_said_to_be_one(tuned: Path, tokens: Path, tmp_path: Path) -> None:
    result = compare(tuned, tokens, tmp_path / "cache", max_loss_rows=4).result
    assert (result["num_rows"], result["num_split_rows"]) == (4, 11)
    assert "Test split: 4 of 11 rows" in describe_outcome(result)


def test_the_counts_of_training_rows_are_stored_and_reused(tuned: Path, tokens: Path, tmp_path: Path) -> None:
    cache = FolderStore(tmp_path / "cache")
    first = compare(tuned, tokens, cache.root)
    folder = cache.publish(first.base_evaluation)
    assert json.loads((folder / "measurement.json").read_text()) == {"class_rows": [1, 3, 1, 1]}
    second = compare(tuned, tokens, cache.root)
    assert second.base_evaluation == folder
    assert second.result == first.result


def test_a_class_without_training_rows_is_named(tuned: Path, tmp_path: Path) -> None:
    tokens = store_tokens(tmp_path / "other", train=[1, 1, 0], test=TEST_LABELS)
    result = compare(tuned, tokens, tmp_path / "cache").result
    assert result["base"]["nats_per_row"] is None
    assert result["improvement"]["nats_per_row_fraction"] is None
    assert any("5 evaluated rows are of classes without a training row" in text for text in result["warnings"])
    json.dumps(result, allow_nan=False)


def test_a_model_no_better_than_the_majority_is_said_to_be_none(tmp_path: Path) -> None:
    base = save_base(make_model(), tmp_path / "base")
    model = make_classifier()
    torch.nn.init.zeros_(model.score.weight)  # always class 0
    tuned = save_tuned_task(
        tmp_path / "tuned", base, model, "full", "sequence_classification", tokens_key="key1", label_map=LABEL_MAP
    )
    tokens = store_tokens(tmp_path / "tokens", train=TRAIN_LABELS, test=[1, 1, 0])
    result = compare(tuned, tokens, tmp_path / "cache").result
    assert result["tuned"]["accuracy"] == pytest.approx(1 / 3)
    assert any("has not learned the task" in text for text in result["warnings"])


def test_a_loss_that_is_no_number_is_reported(tmp_path: Path, tokens: Path) -> None:
    base = save_base(make_model(), tmp_path / "base")
    model = make_classifier()
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    tuned = save_tuned_task(
        tmp_path / "tuned", base, model, "full", "sequence_classification", tokens_key="key1", label_map=LABEL_MAP
    )
    result = compare(tuned, tokens, tmp_path / "cache").result
    assert result["tuned"]["nats_per_row"] is None
    assert any("not a finite number" in text for text in result["warnings"])


def test_without_held_out_rows_it_is_skipped_and_says_so(tuned: Path, tmp_path: Path) -> None:
    tokens = store_tokens(tmp_path / "other", train=TRAIN_LABELS, test=[])
    compared = compare(tuned, tokens, tmp_path / "cache")
    assert compared.result["skipped"]
    assert (compared.answers, compared.columns) == ([], SAMPLE_COLUMNS)
    assert compared.result["tuned"]["accuracy"] is None
    assert describe_outcome(compared.result).startswith("Evaluation skipped.")
    assert "Evaluation skipped." in as_markdown(compared.result)
    FolderStore(tmp_path / "cache").publish(compared.base_evaluation)


def test_the_reports_show_what_was_measured(tuned: Path, tokens: Path, tmp_path: Path) -> None:
    result = compare(tuned, tokens, tmp_path / "cache").result
    text = as_markdown(result)
    assert f"| Accuracy (0 to 1) | {3 / 11:.4f} | {result['tuned']['accuracy']:.4f} |" in text
    shown = on_terminal(result)
    for name in ("Majority class", "Macro-F1", "Classes, the lowest F1 first", "Most frequent confusions"):
        assert name in text
        assert name in shown


def test_sorting_out_wrong_rows_and_choosing_samples() -> None:
    predictions = Predictions(
        rows=np.arange(6),
        classes=np.array([0, 1, 1, 0, 2, 2]),
        probabilities=np.array([0.5, 0.6, 0.9, 0.7, 0.4, 0.8], dtype=np.float32),
        nats=np.ones(6, dtype=np.float32),
        ranks=np.zeros(6, dtype=np.int64),
    )
    wrong, right = sort_out(predictions, np.array([0, 0, 0, 0, 0, 2]), seed=1)
    assert (wrong, right) == ([2, 1, 4], [0, 3, 5])
    assert choose_samples(wrong, right, 3) == [2, 1, 0]
    assert choose_samples(wrong, right, 1) == [2]
    assert choose_samples(wrong, right, 5) == [2, 1, 4, 0, 3]
    assert choose_samples(wrong, right, 99) == [2, 1, 4, 0, 3, 5]
    assert choose_samples([], right, 2) == [0, 3]
    assert choose_samples(wrong, [], 2) == [2, 1]
    assert choose_samples(wrong, right, 0) == []
    assert choose_samples(list(range(5000)), [], 4) == [0, 1, 2, 3]
    assert MAX_WRONG_ROWS >= 100


def test_the_node_stores_rows_with_the_columns_of_the_task(tuned: Path, tokens: Path, tmp_path: Path) -> None:
    from lm_tuning.parameters import EnvironmentParameters, EvaluateParameters, ModelParameters
    from lm_tuning.pipelines.evaluate.nodes import evaluate_models as node

    saved = node(
        tuned,
        tokens,
        FolderStore(tmp_path / "cache"),
        tmp_path / "history",
        evaluate=EvaluateParameters(max_loss_rows=None, num_samples=2),
        model=ModelParameters(dtype="float32"),
        environment=EnvironmentParameters(),
        seed=42,
        output="mine",
    )
    result, report, rows = (saved[name] for name in ("evaluation", "evaluation_report", "evaluation_samples"))
    assert list(rows.columns) == list(SAMPLE_COLUMNS)
    assert len(rows) == 11
    assert len(result["samples"]) == 2
    assert "## Classes, the lowest F1 first" in report
    assert set(saved["evaluation_figures"]) >= {"confusion_matrix", "calibration"}


def test_every_row_has_its_loss_and_the_hardest_come_first(tuned: Path, tokens: Path, tmp_path: Path) -> None:
    compared = compare(tuned, tokens, tmp_path / "cache", top_k=2)
    log_probabilities = by_hand(tuned, open_split(tokens, "test"))
    nats = [-float(row[label]) for row, label in zip(log_probabilities, TEST_LABELS, strict=True)]
    for row in compared.answers:
        assert row["nats"] == pytest.approx(nats[row["row_id"] - 100], rel=SAME_LOSS)  # type: ignore[typeddict-item]
    hardest = compared.result["hardest"]
    order = sorted(range(11), key=lambda index: -nats[index])
    assert [row["row_id"] for row in hardest] == [100 + index for index in order[:10]]
    assert hardest[0]["reference_probability"] == pytest.approx(math.exp(-nats[order[0]]), rel=SAME_LOSS)
    base, scored = compared.scored["nats_per_row"]
    assert scored.row_values.tolist() == pytest.approx(nats, rel=SAME_LOSS)
    assert scored.row_ids.tolist() == list(range(100, 111))
    assert base.value == pytest.approx(compared.result["base"]["nats_per_row"])
    ranks = [
        sorted(row.tolist(), reverse=True).index(float(row[label]))
        for row, label in zip(log_probabilities, TEST_LABELS, strict=True)
    ]
    assert compared.result["tuned"]["top_k_accuracy"] == pytest.approx(sum(rank < 2 for rank in ranks) / 11)
    # The largest class in training, then the first of the three that are next: 3 rows of class 1, 3 of class 0.
    assert compared.result["base"]["top_k_accuracy"] == pytest.approx(6 / 11)


def test_a_threshold_is_measured_and_shown(tuned: Path, tokens: Path, tmp_path: Path) -> None:
    log_probabilities = by_hand(tuned, open_split(tokens, "test"))
    sure = log_probabilities.max(-1).values.exp()
    threshold = float((sure.sort().values[4] + sure.sort().values[5]) / 2)
    result = compare(tuned, tokens, tmp_path / "cache", abstain_below=threshold).result
    is_right = log_probabilities.argmax(-1) == torch.tensor(TEST_LABELS)
    found = result["abstaining"]
    assert found["num_answered"] == 6
    assert found["accuracy"] == pytest.approx(float(is_right[sure >= threshold].float().mean()))
    assert [point["num_answered"] for point in result["coverage"]] == sorted(
        (point["num_answered"] for point in result["coverage"]), reverse=True
    )
    text = as_markdown(result)
    assert "the model answers 6 of 11 rows" in text
    for title in ("Calibration", "Where the model should not answer", "Hardest rows, the highest loss first"):
        assert f"## {title}" in text


def test_more_than_all_classes_are_refused_before_a_model_is_loaded(tuned: Path, tokens: Path, tmp_path: Path) -> None:
    (tuned / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"evaluate\.top_k = 5: the model has 4 classes"):
        compare(tuned, tokens, tmp_path / "cache", top_k=5)


def test_the_classifier_is_measured_in_fewer_bits_too(tuned: Path, tokens: Path, tmp_path: Path) -> None:
    result = compare(tuned, tokens, tmp_path / "cache", quantization="int8").result
    found = result["quantized"]
    assert found["quantization"] == "int8"
    assert found["weights_bytes"] < found["unquantized_weights_bytes"]
    assert found["rows_per_second"] > 0
    assert found["accuracy"] == pytest.approx(result["tuned"]["accuracy"] + found["accuracy_difference"])
    assert 0 < abs(found["nats_per_row_difference"]) < 0.5, "rounded, and the same model all the same"
    assert "## In int8" in as_markdown(result)
