"""What a figure is called in MLflow."""

from __future__ import annotations

from lm_tuning.tracking.names import name_figures, name_step_metrics


def test_training_and_held_out_figures_have_groups_with_the_loss_in_the_first() -> None:
    named = name_step_metrics({"loss_nats_per_token": 2.0, "learning_rate": 0.1})
    named |= name_step_metrics({"validation_nats_per_token": 3.0, "validation_accuracy": 0.5})
    assert named == {
        "train/loss_nats_per_token": 2.0,
        "Loss/train_nats_per_token": 2.0,
        "train/learning_rate": 0.1,
        "validation/nats_per_token": 3.0,
        "Loss/validation_nats_per_token": 3.0,
        "validation/accuracy": 0.5,
    }
    groups = {name.partition("/")[0] for name in named} | {"base", "data", "efficiency", "profile", "test"}
    assert min(groups) == "Loss"  # the UI sorts the groups by their names, as this does


def test_an_evaluation_is_named_after_its_split_and_other_entries_keep_their_names() -> None:
    figures = {"base.rouge_l": 0.1, "tuned.rouge_l": 0.2, "improvement.rouge_l_difference": 0.1, "num_rows": 8.0}
    assert name_figures("evaluation", figures, split="validation") == {
        "base/rouge_l": 0.1,
        "validation/tuned_rouge_l": 0.2,
        "validation/improvement_rouge_l_difference": 0.1,
        "validation/num_rows": 8.0,
    }
    assert name_figures("evaluation", figures, split=None) == {}
    assert name_figures("mine", figures) == figures
    assert name_figures("efficiency", {"efficiency.mfu": 0.4}) == {"efficiency/mfu": 0.4}
    assert name_figures("split_report", {"data_test_rows": 4.0}) == {"data/test_rows": 4.0}
    assert name_figures("generation", {"prompts.num_read": 3.0, "tokens_per_second": 5.0}) == {
        "answers/prompts_num_read": 3.0,
        "answers/tokens_per_second": 5.0,
    }
    assert name_figures("profile", {"profile.idle_fraction": 0.4}) == {"profile/idle_fraction": 0.4}
