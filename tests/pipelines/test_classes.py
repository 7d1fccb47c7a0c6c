"""Splits, classes and limits from the command line: what ends a run, what it says, and that its advice works."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.pipelines.test_whole_run import Project
from tests.support.shell import Shell

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project in which nothing was run yet."""
    folder = tmp_path_factory.mktemp("classes")
    project = Project(folder / "project")
    with Shell(folder, project.environment) as project.shell:
        yield project


def write(project: Project, name: str, rows: Sequence[dict[str, Any]]) -> str:
    (project.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def labelled(*pairs: tuple[str, str], **more: Any) -> list[dict[str, Any]]:
    return [{"text": text, "label": label, **more} for text, label in pairs]


def classify(project: Project, *arguments: str, exit_code: int = 0, **params: Any) -> str:
    settings = {"task": "sequence_classification", "split__validation": 0, "split__test": 0, **params}
    printed = project.run(*arguments, exit_code=exit_code, **settings)
    assert "Traceback" not in printed
    return printed


def report(project: Project, name: str) -> str:
    return (project.folder / "data/08_reporting/smoke" / name).read_text()


TRAIN = labelled(("a a a", "x"), ("b b b", "y"), ("c c c", "x"), ("d d d", "y"), ("e e e", "x"))
TEST = labelled(("a a a", "x"), ("b b b", "x"), ("c c c", "y"))


def test_dropped_copies_are_counted_and_the_advice_ends_the_finding(project: Project) -> None:
    paths = {"data__path": write(project, "train.jsonl", TRAIN), "data__test_path": write(project, "test.jsonl", TEST)}
    printed = classify(project, "--pipelines=split", split__duplicates="drop", **paths)
    assert "3 duplicates, 1 dropped, 2 kept, the text under another label (split.duplicates_by: row)" in printed
    assert "Texts with more than one label: 2, in 4 rows (train 2, test 2)" in printed
    assert "set split.duplicates_by: text" in printed
    assert "split.duplicates: drop " not in printed, "it is set already"
    summary = project.read("08_reporting", "split_summary.json")
    assert summary["rows"] == {"train": 4, "validation": 0, "test": 3}
    assert "Left out, since another row has the same text: train.jsonl, row 1." in report(project, "data_report.md")
    printed = classify(project, "--pipelines=split", split__duplicates="drop", split__duplicates_by="text", **paths)
    assert "3 duplicates dropped" in printed
    assert "Texts with more than one label" not in printed
    assert "Texts whose copies had more than one label: 2, in 4 rows (test 2, left out 2)" in printed
    assert "share" not in printed
    assert project.read("08_reporting", "split_summary.json")["rows"] == {"train": 2, "validation": 0, "test": 3}


def test_a_class_that_is_lost_with_dropped_copies_is_told_in_the_run_and_before_it(project: Project) -> None:
    pairs = [(f"{letter} {letter}", "xy"[index % 2]) for index, letter in enumerate(LETTERS)]
    params = {
        "data__path": write(project, "lost.jsonl", labelled(*pairs, ("a a", "rare"), ("b b", "y"))),
        "split__duplicates": "drop",
        "split__duplicates_by": "text",
        "split__stratify": "label",
        "split__test": 6,
    }
    printed = classify(project, "--pipelines=split,tokenize", **params)
    assert "Classes without a row in any split: 1 in column 'label' ('rare' (1 row))" in printed
    assert "Texts whose copies had more than one label: 1, in 2 rows" in printed
    assert project.read("08_reporting", "split_summary.json")["duplicates"]["conflicts"]["num_texts"] == 1
    classify(project, "--pipelines=preflight", **params)
    figures = project.read("08_reporting", "preflight.json")
    told = [issue["text"] + issue["advice"] for issue in figures["concerns"] if "lass" in issue["text"]]
    assert any("Classes without a row in any split" in one and "split.duplicates_by: row" in one for one in told)
    assert not any("split.stratify, or take those rows out" in one for one in told)
    assert any("never measured: 1 of 3 classes" in one for one in told)


def test_copies_are_named_by_the_file_that_repeats(project: Project) -> None:
    rows = labelled(("a", "x"), ("b", "y"), ("c", "y"))
    paths = {"data__path": write(project, "train.jsonl", rows)}
    paths["data__test_path"] = write(project, "test.jsonl", labelled(("z", "x"), ("b", "y")))
    classify(project, "--pipelines=split", **paths)
    assert "Rows of the splits that repeat an earlier one there: test.jsonl, row 2." in report(
        project, "data_report.md"
    )


def test_old_splits_get_the_new_facts_under_their_key(project: Project) -> None:
    path = write(project, "rows.jsonl", labelled(("a", "x"), ("b", "y"), ("b", "x")))
    classify(project, "--pipelines=split", data__path=path)
    folder = project.folder / "data/02_intermediate/smoke/splits"
    key = json.loads((folder / "current.json").read_text())["key"]
    stored = folder / key / "summary.json"
    old = {name: value for name, value in json.loads(stored.read_text()).items() if name != "facts_version"}
    old["duplicates"] = {"handling": "keep_together", "num_copies": 1, "num_dropped": 0, "num_label_conflicts": 1}
    text = json.dumps(old)
    stored.write_text(text)
    manifest = json.loads((folder / key / "manifest.json").read_text())
    manifest["files"]["summary.json"] = len(text)
    (folder / key / "manifest.json").write_text(json.dumps(manifest))
    assert "Texts with more than one label: 1" in classify(project, "--pipelines=split", data__path=path)
    assert json.loads((folder / "current.json").read_text())["key"] == key
    assert json.loads(stored.read_text())["duplicates"]["num_kept"] == 1


@pytest.mark.parametrize("handling", ["drop", "keep_together"])
def test_earlier_splits_are_written_again_where_copies_were_left_out(project: Project, handling: str) -> None:
    path = write(project, f"two_{handling}.jsonl", labelled(("a", "x"), ("b", "y"), ("b", "x"), ("c", "y")))
    params = {"data__path": path, "split__duplicates": handling, "split__duplicates_by": "text"}
    classify(project, "--pipelines=split", **params)
    folder = project.folder / "data/02_intermediate/smoke/splits"
    key = json.loads((folder / "current.json").read_text())["key"]
    old = json.loads((folder / key / "summary.json").read_text())
    new = json.loads(json.dumps(old))
    old["facts_version"] = 2
    del old["lost_classes"], old["duplicates"]["conflicts"]["num_texts_in_splits"]
    del old["duplicates"]["conflicts"]["num_rows_left_out"]
    text = json.dumps(old)
    (folder / key / "summary.json").write_text(text)
    manifest = json.loads((folder / key / "manifest.json").read_text())
    manifest["files"]["summary.json"] = len(text)
    (folder / key / "manifest.json").write_text(json.dumps(manifest))
    printed = classify(project, "--pipelines=split", **params)
    assert ("Splits reused" in printed) is (handling == "keep_together")
    told = project.read("08_reporting", "split_summary.json")
    assert told["duplicates"] == new["duplicates"]
    assert told["lost_classes"] == new["lost_classes"]


@pytest.mark.parametrize(
    ("rows", "params", "words"),
    [
        (
            [*labelled(*((f"ok {n}", "ok") for n in range(4)), g=1), *labelled(("no 1", "no"), ("no 2", "no"), g=2)],
            {"split__validation": 2, "split__group": "g"},
            [
                "Only one class is left in train: 'ok' (4 rows)",
                "The 2 rows of the other class in column 'label' ('no') went elsewhere: validation 2.",
                "set split.group: null and split.stratify: label (now g: rows of a group stay together)",
                "hold out less (now split.validation: 2)",
            ],
        ),
        (
            labelled(("same", "ok"), ("same", "no"), ("more", "ok")),
            {"split__duplicates": "drop", "split__duplicates_by": "text"},
            ["'ok' (2 rows)", "left out as copies 1", "split.duplicates_by: row"],
        ),
        (
            labelled(*((f"{n}", "ok") for n in range(6)), *((f"no {n}", "no") for n in range(6))),
            {"data__max_rows": 5},
            ["holds one class only in the training rows, 'ok' (5 rows)", "data.max_rows: 5 took only the first 5 rows"],
        ),
        (
            [*labelled(*((f"{n}", "ok") for n in range(60))), {"text": 7, "label": "no"}],
            {"data__on_bad_row": "skip"},
            ["holds one class only in the training rows, 'ok' (60 rows)", "1 bad row of the training files"],
        ),
    ],
)
def test_one_class_to_train_on_ends_the_run(
    project: Project, rows: list[dict[str, Any]], params: dict[str, Any], words: list[str]
) -> None:
    before = sorted((project.folder / "data/02_intermediate").rglob("splits/*"))
    path = write(project, "rows.jsonl", rows)
    printed = classify(project, "--pipelines=split", exit_code=2, data__path=path, **params)
    for word in words:
        assert word in printed, printed
    assert sorted((project.folder / "data/02_intermediate").rglob("splits/*")) == before


def test_one_class_in_train_is_cured_as_the_message_says(project: Project) -> None:
    rows = [*labelled(*((f"ok {n}", "ok") for n in range(4)), g=1), *labelled(("no 1", "no"), ("no 2", "no"), g=2)]
    params = {"data__path": write(project, "rows.jsonl", rows), "split__group": "g", "split__validation": 2}

    def left(**changes: Any) -> int:
        classify(project, "--pipelines=split", **{**params, **changes})
        num: int = project.read("08_reporting", "split_summary.json")["class_shares"]["splits"]["train"]["num_classes"]
        return num

    assert left(split__group="null", split__stratify="label") == 2
    assert left(split__validation=0) == 2
    # With more groups of the larger class strata are enough, and are named then.
    rows += [*labelled(("ok 9", "ok"), g=3), *labelled(("ok 10", "ok"), g=4)]
    seeds = range(10)
    params["data__path"] = write(project, "more.jsonl", rows)
    for seed in seeds:
        done = project.shell.kedro(  # type: ignore[union-attr]
            project.folder,
            *project.arguments("--pipelines=split", task="sequence_classification", seed=seed, split__test=0, **params),
        )
        if done.code:
            assert "set split.stratify: label, which keeps rows of each class in train" in done.stdout + done.stderr
            assert left(split__stratify="label", seed=seed) == 2
            return
    raise AssertionError(f"no seed of {seeds} holds the rarer class out")


def test_a_class_of_a_held_out_file_alone_is_told_by_split(project: Project) -> None:
    train = write(project, "train.jsonl", labelled(("a", "x"), ("b", "y")))
    for name in ("validation", "test"):
        other = write(project, f"{name}.jsonl", labelled(("c", "x"), ("d", "new"), ("e", "new")))
        params = {"data__path": train, f"data__{name}_path": other}
        printed = classify(project, "--pipelines=split", exit_code=2, **params)
        line = f"No training row has the class 'new' of 2 rows of {name}, the first at {name}.jsonl, row 2."
        assert line in printed


def test_held_out_rows_that_are_all_too_long_name_the_limit(project: Project) -> None:
    train = write(project, "train.jsonl", labelled(*((letter, "xy"[n % 2]) for n, letter in enumerate(LETTERS))))
    long = write(project, "long.jsonl", labelled(("w" * 40, "x"), ("v" * 50, "y")))
    cut = {"tokenize__max_length_tokens": 20, "tokenize__truncation": "drop"}
    for name in ("validation", "test"):
        params = {"data__path": train, f"data__{name}_path": long, **cut}
        printed = classify(project, "--pipelines=split,tokenize", exit_code=2, **params)
        assert f"No {name} row is left after tokenizing with tokenize.max_length_tokens = 20. Read: 2." in printed
        assert "2 (longer than tokenize.max_length_tokens; long.jsonl, rows 1, 2)" in printed
        assert "raise tokenize.max_length_tokens to 40 or more" in printed
        classify(project, "--pipelines=split,tokenize", **{**params, "tokenize__max_length_tokens": 40})
        assert project.read("08_reporting", "token_summary.json")["splits"][name]["num_rows"] == 1
    # The same of the training rows, and of all rows of one class.
    params = {"data__path": long, "tokenize__max_lost_fraction": 1}
    printed = classify(project, "--pipelines=split,tokenize", exit_code=2, **params, **cut)
    assert "No training row is left after tokenizing with tokenize.max_length_tokens = 20. Read: 2." in printed
    assert "raise tokenize.max_length_tokens to 40 or more" in printed
    rows = labelled(*((letter, "x") for letter in LETTERS), ("w" * 40, "y"), ("v" * 50, "y"))
    params["data__path"] = write(project, "rows.jsonl", rows)
    printed = classify(project, "--pipelines=split,tokenize", exit_code=2, **params, **cut)
    assert "'y' (2 rows). Only one class is left in train: 'x' (26 rows)." in printed
    params["data__path"] = write(project, "rows.jsonl", [*rows, *labelled(("zz", "z"))])
    printed = classify(project, "--pipelines=split,tokenize", **params, **cut)
    assert "'y' (2 rows). They are never learned." in printed


def test_a_limit_that_cuts_most_tokens_ends_the_run_unless_it_is_meant(project: Project) -> None:
    rows = [{"question": letter * 400, "answer": letter} for letter in LETTERS]
    params = {"data__path": write(project, "rows.jsonl", rows), "tokenize__max_length_tokens": 20}
    params |= {"split__validation": 0, "split__test": 0}
    printed = project.run("--pipelines=split,tokenize", exit_code=2, **params)
    # A row has the role, 400 letters, the end, the role, a letter and the end.
    assert f"cuts {385 / 405:.1%} of the tokens of the training rows away ({26 * 385:,} of {26 * 405:,})" in printed
    assert "tokenize.max_lost_fraction = 0.5 lets 50.0% pass: of 26 training rows 26 rows beyond" in printed
    assert "tokenize.max_length_tokens = 405 would hold every row" in printed
    assert "Traceback" not in printed
    project.run("--pipelines=split,tokenize", **params, tokenize__max_lost_fraction=1)
    # Stored tokens are held to the same limit, and it makes no others.
    assert "reused" in project.run("--pipelines=tokenize", **params, tokenize__max_lost_fraction=0.96).lower()
    printed = project.run("--pipelines=tokenize", exit_code=2, **params)
    assert "tokenize.max_lost_fraction = 0.5" in printed
    raised = {**params, "tokenize__max_length_tokens": 405, "train__effective_batch_tokens": 1024}
    project.run("--pipelines=tokenize", **raised)


def test_advice_ends_at_what_the_model_takes(project: Project) -> None:
    rows = [{"question": "a", "answer": "b"}] * 3 + [{"question": letter * 900, "answer": letter} for letter in LETTERS]
    params = {"data__path": write(project, "rows.jsonl", rows), "tokenize__max_length_tokens": 64}
    params |= {"split__validation": 0, "split__test": 0}
    printed = project.run("--pipelines=split,tokenize", exit_code=2, **params)
    assert "models/tiny takes at most 512 tokens." in printed
    assert "raise tokenize.max_length_tokens to 512 at most" in printed
    assert "905" not in printed.partition("Fix:")[2]
    project.run("--pipelines=split,preflight", **params, tokenize__max_lost_fraction=1)
    figures = project.read("08_reporting", "preflight.json")
    (cut,) = [one for one in figures["concerns"] if " cut in " in one["text"]]
    assert "The model takes 512 tokens at most" in cut["advice"]
    assert "905" not in cut["advice"]


def test_a_shifted_test_set_is_told_and_compared_with_its_best_constant_answer(project: Project) -> None:
    names = [f"intent {n:02}" for n in range(40)]
    train = labelled(*((f"{name} {n}", name) for name in names for n in range(4)))
    test = labelled(*((f"{name} x", name) for name in names), *((f"what {n}", "intent 33") for n in range(60)))
    params: dict[str, Any] = {"data__path": write(project, "train.jsonl", train), "evaluate__max_loss_rows": "null"}
    params["data__test_path"] = write(project, "test.jsonl", test)
    params |= {"train__effective_batch_tokens": "null", "train__effective_batch_rows": 4, "train__max_steps": 1}
    params |= {"train__eval_every_steps": "null"}
    printed = classify(project, "--pipelines=split,train,evaluate", **params)
    warning = (
        "Classes in column 'label' whose share differs a lot between train and test, by more than chance: 'intent 33' "
        "(2.5% of the training rows, 61.0% of the test rows)"
    )
    assert warning in printed
    evaluation = project.read("08_reporting", "evaluation.json")
    assert evaluation["base"]["accuracy"] == 0.01
    assert (evaluation["base"]["class"], evaluation["base"]["num_tied_classes"]) == ("intent 00", 40)
    assert evaluation["best_constant"]["accuracy"] == 0.61
    assert (evaluation["best_constant"]["class"], evaluation["best_constant"]["num_tied_classes"]) == ("intent 33", 1)
    text = report(project, "evaluation.md")
    assert "intent 00, one of 40 equally frequent classes; always answering it is right for 1.00%" in text
    assert "| these test rows | intent 33 | 0.6100 |" in text
    assert "| intent 33 | 4 | 2.50% | 61 | 61.00% |" in text
    text = report(project, "data_report.md")
    assert "Test: 40 classes, the largest intent 33 (61.00%)." in text
    assert "Train: 40 classes, the largest intent 00, one of 40 equally frequent classes (2.50%)." in text
    assert "| intent 33 | 4 (2.50%) | 0 (0.00%) | 61 (61.00%) |" in text
    assert "| intent 33 | 33 | 4 | 0 | 61 |" in text
    # Doing what it says ends it: rows taken out until the shares are alike.
    even = labelled(*((f"{name} x", name) for name in names))
    params["data__test_path"] = write(project, "test.jsonl", even)
    assert "share differs" not in classify(project, "--pipelines=split", **params)
