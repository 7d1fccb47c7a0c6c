"""Copies are counted as a reader would count them, and what a message advises makes it go away."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lm_tuning.data.readers.base import beyond_row
from lm_tuning.data.split.folder import describe_splits, read_copies
from lm_tuning.data.splits_report import build_splits_section
from lm_tuning.errors import UserError

SPLITS = ("train", "validation", "test")
TRAIN = [("a a a", "x"), ("b b b", "y"), ("c c c", "x"), ("d d d", "y")]
TEST = [("a a a", "x"), ("b b b", "x"), ("c c c", "y")]


def labelled(pairs: Any) -> list[dict[str, str]]:
    return [{"text": text, "label": label} for text, label in pairs]


@pytest.fixture
def files(write_rows) -> dict[str, Path]:
    return {
        "train": write_rows(labelled(TRAIN), "train.jsonl"),
        "test": write_rows(labelled(TEST), "test.jsonl"),
    }


def divided(split: Any, files: dict[str, Path], **options: Any) -> Any:
    return split(
        files["train"],
        validation_path=files.get("validation"),
        test_path=files.get("test"),
        format="text_label",
        **options,
    )


def test_what_was_dropped_is_told_from_what_only_shares_its_text(split, files):
    made = divided(split, files, duplicates="drop")
    assert made.ids("train") == [2, 3, 4]
    copies = made.summary["duplicates"]
    assert (copies["num_copies"], copies["num_dropped"], copies["num_kept"]) == (3, 1, 2)
    assert copies["num_dropped_by_file"] == {"train": 1, "validation": 0, "test": 0}
    line = "3 duplicates, 1 dropped, 2 kept, the text under another label (split.duplicates_by: row)"
    assert line in describe_splits(made.summary)
    section = build_splits_section(made.summary, read_copies(made.folder))
    assert section["facts"]["copies"] == {
        "left_out": {str(files["train"]): [1]},
        "exact": {str(files["test"]): [2, 3]},
    }
    text = section["markdown"].replace("\\_", "_")
    assert "and NFC: 3. Left out: 1 (`split.duplicates: drop`, `split.duplicates_by: row`). Copies in the" in text
    assert f"Left out, since another row has the same text: {files['train']}, row 1." in text
    assert "Texts with more than one label: 2, in 4 rows (2 in train, 2 in test)." in text
    assert f"- {files['train']}, row 2 ('y') and {files['test']}, row 2 ('x')\n- " in text


def test_the_advice_of_a_text_with_two_labels_works(split, files):
    """No warning names what is set already, and doing what it says ends it."""
    options: dict[str, Any] = {"duplicates": "keep_together"}
    made = divided(split, files, **options)
    conflict, shared = made.summary["warnings"]
    assert conflict.startswith(
        f"Texts with more than one label: 2, in 4 rows (train 2, test 2), such as {files['train']}, row 2 ('y') and "
        f"{files['test']}, row 2 ('x')."
    )
    assert "set split.duplicates: drop with split.duplicates_by: text" in conflict
    assert shared.startswith(
        "train and test share 3 texts (3 rows of train, 3 rows of test), so what is measured on test looks too good; "
        "2 rows of train under another label."
    )
    assert "set split.duplicates: drop with split.duplicates_by: text, which leaves them out of train" in shared
    made = divided(split, files, duplicates="drop")
    conflict, shared = made.summary["warnings"]
    assert "set split.duplicates_by: text, which keeps one row of each text" in conflict
    assert "share 2 texts (2 rows of train, 2 rows of test), under other labels, so what train says" in shared
    assert "set split.duplicates_by: text, which leaves them out of train" in shared
    made = divided(split, files, duplicates="drop", duplicates_by="text")
    assert (made.ids("train"), made.ids("test")) == ([4], [5, 6, 7])
    (hidden,) = (warning for warning in made.summary["warnings"] if "share" in warning or "label:" in warning)
    assert hidden == (
        f"Texts whose copies had more than one label: 2, in 4 rows (test 2, left out 2), such as {files['train']}, "
        f"row 2 ('y') and {files['test']}, row 2 ('x'). split.duplicates_by: text kept one label of each (a test row "
        "before a validation row before a training row, else the first), which may be the wrong one. Fix: correct the "
        "labels, or take such texts out of the files."
    )
    text = build_splits_section(made.summary, read_copies(made.folder))["markdown"]
    assert "Texts with more than one label: 2, in 4 rows (2 in test, 2 left out)." in text
    assert made.summary["duplicates"]["num_dropped"] == 3
    assert "3 duplicates dropped" in describe_splits(made.summary)


def test_a_label_that_went_with_a_near_duplicate_is_not_put_down_to_another_setting(split, write_rows):
    sentence = "The committee will meet again on Thursday to decide whether the bridge can be repaired before winter"
    rows = [*TRAIN, (f"{sentence}!", "x"), (sentence, "x"), (sentence, "y")]
    files = {"train": write_rows(labelled(rows), "train.jsonl")}
    made = divided(split, files, duplicates="drop", near_duplicates="drop")
    assert made.summary["near_duplicates"]["num_dropped"] == 1
    (told,) = (warning for warning in made.summary["warnings"] if "had more than one label" in warning)
    assert "1, in 2 rows (train 1, left out 1)" in told
    assert "split.near_duplicates: drop left no more than one label of each" in told
    assert "split.duplicates_by" not in told, "it is row, so it left nothing out"


def test_a_class_whose_rows_were_all_left_out_as_copies_is_named(split, write_rows):
    rows = [*TRAIN, ("a a a", "rare"), ("a a a", "other"), ("b b b", "other")]
    files = {"train": write_rows(labelled(rows), "train.jsonl")}
    made = divided(split, files, duplicates="drop", duplicates_by="text")
    assert made.summary["lost_classes"] == {
        "column": "label",
        "num_classes": 2,
        "num_rows_by_class": {"other": 2, "rare": 1},
    }
    assert made.summary["duplicates"]["conflicts"]["num_texts"] == 2
    (lost,) = (warning for warning in made.summary["warnings"] if warning.startswith("Classes without"))
    assert lost == (
        "Classes without a row in any split: 2 in column 'label' ('other' (2 rows), 'rare' (1 row)), since all their "
        "rows were left out as copies of texts under another label. They are neither learned nor measured. Fix: "
        "correct the labels, or set split.duplicates_by: row, which keeps copies under another label."
    )
    assert divided(split, files, duplicates="drop", duplicates_by="row").summary["lost_classes"] is None


def test_row_numbers_are_written_as_editors_take_them_without_separators(split, write_rows):
    rows = [(f"text {number}", "xy"[number % 2]) for number in range(1200)]
    rows += [("text 1100", "y"), ("text 1100", "x")]
    made = divided(split, {"train": write_rows(labelled(rows), "train.jsonl")}, duplicates="drop")
    (conflict,) = made.summary["warnings"]
    assert "train.jsonl, row 1101 ('x')" in conflict and "train.jsonl, row 1201 ('y') and 1 more row" in conflict
    text = build_splits_section(made.summary, read_copies(made.folder))["markdown"]
    assert "train.jsonl, row 1202." in text
    assert "| 1,201 |" in text, "counts have separators"
    with pytest.raises(UserError, match="cannot be read after row 1200: cut off"):
        raise beyond_row("a.jsonl.gz", 1200, EOFError("cut off"))


def follow(warning: str) -> dict[str, str]:
    """Return the keys that a warning's advice sets; of two ways the first."""
    advice = warning.partition("Fix: ")[2]
    found = re.findall(r"split\.(duplicates|duplicates_by): (\w+)", advice)
    return dict(reversed(found))


pairs = st.tuples(st.sampled_from("abcde"), st.sampled_from("xyz"))
small = st.lists(pairs, max_size=7)


DRAWN = st.fixed_dictionaries(
    {
        "train": st.lists(pairs, min_size=6, max_size=14),
        "validation": small,
        "test": small,
        "options": st.fixed_dictionaries(
            {
                "duplicates": st.sampled_from(["keep_together", "drop", "ignore"]),
                "duplicates_by": st.sampled_from(["row", "text"]),
                "seed": st.integers(0, 2),
                "validation": st.integers(0, 2),
            }
        ),
    }
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=DRAWN)
@example(
    drawn={
        "train": [("a", "y"), *[("a", "x")] * 5],
        "validation": [],
        "test": [("a", "y")],
        "options": {"duplicates": "ignore", "duplicates_by": "row", "seed": 2, "validation": 2},
    }
)
def test_every_figure_is_that_of_a_count_by_hand(write_rows, split, drawn):
    options = drawn["options"]
    rows = {name: list(drawn[name]) for name in SPLITS}
    rows["train"] += [("p", "x"), ("q", "y"), ("r", "x"), ("s", "y")]
    files = {name: write_rows(labelled(of_file), f"{name}.jsonl") for name, of_file in rows.items() if of_file}
    try:
        made = divided(split, files, **options)
    except UserError as error:
        assert "cannot be divided" in str(error)
        return
    read = [pair for name in SPLITS for pair in rows[name]]
    kept = {name: [(row["text"], row["label"]) for row in made.rows[name]] for name in SPLITS}
    copies = made.summary["duplicates"]
    texts = Counter(text for text, _ in read)
    assert copies["num_copies"] == sum(count - 1 for count in texts.values())
    assert copies["num_dropped"] == len(read) - sum(map(len, kept.values()))
    all_kept = [pair for of_split in kept.values() for pair in of_split]
    assert copies["num_kept"] == len(all_kept) - len({text for text, _ in all_kept})
    by_text = defaultdict(set)
    for text, label in all_kept:
        by_text[text].add(label)
    assert copies["conflicts"]["num_texts_in_splits"] == sum(len(found) > 1 for found in by_text.values())
    labels_read = defaultdict(set)
    for text, label in read:
        labels_read[text].add(label)
    contrary = {text for text, found in labels_read.items() if len(found) > 1}
    assert copies["conflicts"]["num_texts"] == len(contrary)
    num_contrary = sum(text in contrary for text, _ in read)
    assert copies["conflicts"]["num_rows"] == num_contrary
    left_out = num_contrary - sum(text in contrary for text, _ in all_kept)
    assert copies["conflicts"]["num_rows_left_out"] == left_out
    assert copies["conflicts"]["num_rows_by_split"] == {
        name: sum(text in contrary for text, _ in of_split) for name, of_split in kept.items()
    }
    assert copies["num_label_conflicts"] == sum(len(found) - 1 for found in by_text.values())
    sides = {name: {text for text, _ in of_split} for name, of_split in kept.items()}
    shared = {
        f"{one}_{other}": sides[one] & sides[other]
        for one, other in (("train", "validation"), ("train", "test"), ("validation", "test"))
    }
    assert made.summary["overlap"] == {pair: len(found) for pair, found in shared.items()}
    for pair, found in shared.items():
        for name in pair.split("_") if found else ():
            other = next(side for side in pair.split("_") if side != name)
            of_shared = [row for row in kept[name] if row[0] in found]
            assert made.summary["overlap_rows"][pair][name]["num_rows"] == len(of_shared)
            foreign = [row for row in of_shared if row not in kept[other]]
            assert made.summary["overlap_other_labels"][pair][name] == len(foreign)
    assert copies["num_shared_texts"] == len(set().union(*shared.values()))
    if options["duplicates"] == "drop":
        keys = [text if options["duplicates_by"] == "text" else (text, label) for text, label in all_kept]
        assert len(set(keys)) == len(keys)
        assert copies["num_kept"] == copies["num_copies"] - copies["num_dropped"]
    for name, of_split in kept.items():
        labels = Counter(label for _, label in of_split)
        facts = made.summary["class_shares"]["splits"][name]
        assert (facts["num_rows"], facts["num_classes"]) == (len(of_split), len(labels))
        assert {one["class"]: one["num_rows"] for one in facts["largest"]} == labels
        assert facts["num_largest"] == list(labels.values()).count(max(labels.values(), default=0))
    stored = read_copies(made.folder)
    ids = {name: made.ids(name) for name in SPLITS}
    listed = sorted((row_id, text) for name in SPLITS for row_id, (text, _) in zip(ids[name], kept[name], strict=True))
    seen: set[str] = set()
    repeats = [row_id for row_id, text in listed if text in seen or seen.add(text)]
    assert stored["exact"].tolist() == repeats
    assert stored["left_out"].tolist() == sorted(set(range(1, len(read) + 1)) - {row_id for row_id, _ in listed})
    for warning in made.summary["warnings"]:
        about = warning.partition(" share ")[0] if " texts (" in warning or " text (" in warning else warning[:24]
        if about not in {"train and validation", "train and test", "validation and test", "Texts with more than one"}:
            continue
        assert follow(warning).items() - options.items(), f"advises what is set: {warning}"
        try:
            remade = divided(split, files, **{**options, **follow(warning)})
        except UserError:
            continue  # too few rows are left
        assert not [one for one in remade.summary["warnings"] if one.startswith(about)], warning
