"""The tokenize pipeline stores tokens by key, and makes them again exactly when what they depend on has changed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.data.settings import split_settings
from lm_tuning.data.sources.describe import describe_files
from lm_tuning.errors import UserError
from lm_tuning.parameters.data import DataParameters, SplitParameters, TokenizeParameters
from lm_tuning.parameters.groups import EvaluateParameters, ModelParameters
from lm_tuning.parameters.train import TrainParameters
from lm_tuning.pipelines.tokenize.nodes import prepare_base_model, tokenize_examples
from lm_tuning.storage.folders import FolderStore, read_manifest
from lm_tuning.text.store.table import open_split
from tests.support.tiny import END, bart_config, ids, make_tokenizer, save_tiny_model
from tests.text.conftest import store_examples

DATA = DataParameters(path="rows.jsonl")
SPLIT = SplitParameters()
ROWS = [("2+2?", "4", None), ("3+3?", "6", None)]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run in, with a model and stored splits."""
    monkeypatch.chdir(tmp_path)
    save_tiny_model(Path("model"))
    publish_splits("s1", ROWS)
    return tmp_path


def publish_splits(key: str, rows: list[Any], *, task: str = "causal_lm", **stored: Any) -> None:
    store = FolderStore(Path("splits"))
    staged = store.stage(key)
    format = "text_label" if task == "sequence_classification" else "prompt_response"
    store_examples(staged.path, format, rows, **stored)
    Path("rows.jsonl").write_text("rows\n")
    staged.facts = {
        "settings": split_settings(DATA, SPLIT, seed=1, task=task),
        "files": describe_files(train="rows.jsonl"),
    }
    store.publish(staged)


def run_whole(
    seed: int = 1, task: str = "causal_lm", class_weights: dict[str, float] | None = None, **tokenize: Any
) -> tuple[Path, dict[str, Any], Any, dict[str, Any], bool]:
    """Run both nodes and publish; give all outputs, and whether the stored folder was reused."""
    base_model = prepare_base_model(ModelParameters(name_or_path="./model"), EvaluateParameters(), task=task)
    store = FolderStore(Path("tokens"), keep=10)
    made, summary, figure, report = tokenize_examples(
        FolderStore(Path("splits")).current(),
        base_model,
        token_cache=store,
        tokenize=TokenizeParameters(**{"max_length_tokens": 64, **tokenize}),
        data=DATA,
        split=SPLIT,
        train=TrainParameters(class_weights=class_weights),
        seed=seed,
        task=task,
    )
    return store.publish(made), summary, figure, report, isinstance(made, Path)


def run(seed: int = 1, **tokenize: Any) -> tuple[Path, dict[str, Any], Any, bool]:
    """Run both nodes without the report."""
    folder, summary, figure, _, reused = run_whole(seed, **tokenize)
    return folder, summary, figure, reused


def test_reused_tokens_come_with_the_same_report(project):
    *_, report, reused = run_whole()
    *_, again, reused_again = run_whole()
    assert (reused, reused_again) == (False, True)
    assert report == again
    assert sorted(report) == ["facts", "markdown", "metrics"]
    assert report["facts"]["sources"] == [{"path": "rows.jsonl", "weight": 1.0, "num_rows": 2}]


def test_tokens_are_published_with_their_summary_and_reused(project, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    folder, summary, figure, reused = run()
    assert not reused
    assert len(open_split(folder, "train")) == 2
    assert summary["splits"]["train"]["num_supervised_tokens"] == 4
    facts = read_manifest(folder)["facts"]
    assert facts["sources"]["splits"] == "s1"
    assert facts["base_model"]["name_or_path"] == "model"
    assert figure.startswith(b"\x89PNG")
    assert "Tokens made: 2 train, 0 validation, 0 test rows; train 18 tokens, 22% of them supervised" in caplog.text
    monkeypatch.setattr("lm_tuning.text.summary.draw_lengths", None)  # what is stored is not drawn again
    again, same, kept, reused = run()
    assert reused
    assert (again, same, kept) == (folder, summary, figure)
    assert (
        "Tokens reused: 2 train, 0 validation, 0 test rows; train 18 tokens, 22% of them supervised, 9 per row"
        in caplog.text
    )


def test_other_rows_make_other_tokens(project):
    folder, *_ = run()
    publish_splits("s2", [*ROWS, ("4+4?", "8", None)])
    other, summary, _, reused = run()
    assert not reused
    assert other != folder
    assert summary["splits"]["train"]["num_rows"] == 3


@pytest.mark.parametrize("change", [{"max_length_tokens": 32}, {"loss_on": "all"}, {"control_tokens": "keep"}])
def test_other_settings_make_other_tokens(project, change):
    folder, *_ = run()
    other, summary, _, reused = run(**change)
    assert not reused
    assert other != folder
    assert {name: summary[name] for name in change} == change


def test_tokens_of_another_version_are_made_again_with_a_word(project, caplog, monkeypatch):
    folder, *_ = run()
    monkeypatch.setattr("lm_tuning.text.tokenize.TOKENS_VERSION", 99)
    other, *_, reused = run()
    assert (reused, other != folder) == (False, True)
    assert f"The stored tokens in {folder} were made by another version" in caplog.text
    caplog.clear()
    run(max_length_tokens=32)
    assert "another version" not in caplog.text


def test_another_chat_template_makes_other_tokens(project):
    folder, *_ = run()
    template = make_tokenizer().chat_template.replace("<|end|>", "<|end|>\n")
    Path("model/chat_template.jinja").write_text(template)
    other, _, _, reused = run()
    assert not reused
    assert other != folder


def test_the_task_and_its_limit_reach_the_tokens_and_are_part_of_their_key(project):
    from transformers import BartForConditionalGeneration

    folder, *_ = run()
    BartForConditionalGeneration(bart_config()).save_pretrained("model")
    publish_splits("s1", ROWS, task="seq2seq_lm")
    other, summary, *_ = run_whole(task="seq2seq_lm", max_target_tokens=2)
    assert other != folder
    assert (summary["task"], summary["max_target_tokens"]) == ("seq2seq_lm", 2)
    assert [row.input_ids.tolist() for row in open_split(other, "train")] == [
        [*ids("2+2?"), END, *ids("4"), END],
        [*ids("3+3?"), END, *ids("6"), END],
    ]
    shorter, summary, *_ = run_whole(task="seq2seq_lm", max_target_tokens=3)
    assert (shorter != other, summary["max_target_tokens"]) == (True, 3)


def test_other_weights_keep_the_tokens(project):
    run()
    path = Path("model/config.json")
    path.write_text(path.read_text() + "\n")
    assert run()[-1]


def test_a_failure_leaves_nothing_behind(project):
    folder, *_ = run()
    with pytest.raises(UserError, match="max_length_tokens = 4"):
        run(max_length_tokens=4)
    assert FolderStore(Path("tokens")).current() == folder
    assert sorted(path.name for path in Path("tokens").iterdir()) == sorted([folder.name, "current.json"])


def test_a_class_weight_of_no_class_stops_before_tokenizing_and_with_stored_tokens(project):
    rows = [("a good card", "card"), ("much cash", "cash")]
    publish_splits("s1", rows, task="sequence_classification", label_map={"card": 0, "cash": 1})
    refusal = r"train.class_weights.crad = 2: .* 'crad'. Did you mean 'card'\?\nThe classes are 'card', 'cash';"
    with pytest.raises(UserError, match=refusal):
        run_whole(task="sequence_classification", class_weights={"crad": 2.0})
    assert not Path("tokens/current.json").exists()
    run_whole(task="sequence_classification", class_weights={"card": 2.0})
    with pytest.raises(UserError, match=refusal):
        run_whole(task="sequence_classification", class_weights={"crad": 2.0})


def test_a_missing_model_stops_before_tokenizing(project):
    with pytest.raises(UserError, match=r"model folder \./nowhere does not exist"):
        prepare_base_model(ModelParameters(name_or_path="./nowhere"), EvaluateParameters(), task="causal_lm")


def test_the_graph_is_a_table():
    from lm_tuning.pipelines.tokenize import create_pipeline

    pipeline = create_pipeline()
    assert [node.short_name for node in pipeline.nodes] == ["prepare_base_model", "tokenize_examples"]
    names = ("model", "evaluate", "tokenize", "data", "split", "train", "seed", "task")
    settings = {f"params:{name}" for name in names}
    assert pipeline.inputs() == {*settings, "example_splits", "token_cache"}
    assert pipeline.all_outputs() == {
        "base_model",
        "tokenized_examples",
        "token_summary",
        "length_histogram",
        "token_report",
    }


def test_splits_of_other_parameters_or_changed_rows_are_refused(project):
    with pytest.raises(UserError, match=r"seed: the stored splits were made with 1, the parameters say 2"):
        run(seed=2)
    Path("rows.jsonl").write_text("other rows")
    with pytest.raises(UserError, match=r"rows.jsonl has changed since .*(\n.*)*--pipelines=split"):
        run()
    Path("rows.jsonl").unlink()  # rows that are gone cannot have changed
    run()
