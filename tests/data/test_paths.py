"""A path stands for one file, a folder, a pattern or a saved data set, always in the same order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lm_tuning.data.sources.paths import find_local, resolve_path
from lm_tuning.errors import UserError

ROW = '{"text": "a"}\n'


def make(*names: str, content: str = ROW) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(content)


def found(text: str, split: str = "train") -> list[str]:
    files = find_local(text, key="data.path", split=split)
    assert files is not None
    return [path.as_posix() for path in files.paths]


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_backslashes_are_slashes_in_files_folders_and_patterns():
    make("data/01_raw/train.jsonl")
    for text in (r"data\01_raw\train.jsonl", r"data\01_raw", r"data\01_raw\*.jsonl", r"data\**\t*.jsonl"):
        assert found(text) == ["data/01_raw/train.jsonl"]


def test_a_file_whose_name_has_a_backslash_or_a_pattern_wins():
    make("odd\\name.jsonl", "a[1].jsonl", "a1.jsonl")
    assert resolve_path("odd\\name.jsonl") == Path("odd\\name.jsonl")
    assert found("a[1].jsonl") == ["a[1].jsonl"]
    assert found("a[12].jsonl") == ["a1.jsonl"]


def test_file_addresses_are_local_paths(project):
    make("with space.jsonl")
    assert found((project / "with space.jsonl").as_uri()) == [(project / "with space.jsonl").as_posix()]


def test_a_folder_stands_for_all_files_of_rows_below_it_by_path():
    make("rows/b.jsonl.gz", "rows/a/z.csv", "rows/a.PARQUET", "rows/.hidden.jsonl", "rows/.cache/a.jsonl")
    make("rows/README.md", "rows/LICENSE", "rows/dataset_info.json", "rows/sub/photo.png")
    make("rows/none.jsonl", content="")
    assert found("rows") == ["rows/a.PARQUET", "rows/a/z.csv", "rows/b.jsonl.gz"]
    files = find_local("rows", key="data.path", split="train")
    assert files is not None
    assert (files.is_single, files.num_others, files.empty) == (False, 4, [Path("rows/none.jsonl")])


def test_links_to_folders_are_followed_once():
    make("far/a.jsonl", "rows/b.jsonl")
    Path("rows/link").symlink_to(Path("far").resolve())
    Path("far/loop").symlink_to(Path("rows").resolve())
    assert found("rows") == ["rows/b.jsonl", "rows/link/a.jsonl"]


def test_patterns_match_as_in_a_shell():
    make("rows/a-1.jsonl", "rows/a-2.jsonl", "rows/a-10.jsonl", "rows/sub/a-3.jsonl", "rows/.a-4.jsonl", "rows/a-5.txt")
    assert found("rows/a-?.jsonl") == ["rows/a-1.jsonl", "rows/a-2.jsonl"]
    assert found("rows/a-*") == ["rows/a-1.jsonl", "rows/a-10.jsonl", "rows/a-2.jsonl"]
    assert found("rows/**/a-[13].jsonl") == ["rows/a-1.jsonl", "rows/sub/a-3.jsonl"]


def save_split(folder: str, *names: str) -> None:
    make(*(f"{folder}/{name}" for name in names))
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    make(f"{folder}/state.json", content=json.dumps(state))


def test_a_saved_data_set_is_its_arrow_files_in_its_own_order():
    save_split("saved", "data-00001-of-00002.arrow", "data-00000-of-00002.arrow")
    make("saved/cache-123.arrow", "saved/dataset_info.json")
    assert found("saved") == ["saved/data-00001-of-00002.arrow", "saved/data-00000-of-00002.arrow"]
    Path("saved/data-00000-of-00002.arrow").unlink()
    with pytest.raises(UserError, match=r"which is damaged: data-00000-of-00002\.arrow missing"):
        found("saved")


def test_a_saved_set_of_splits_gives_the_split_that_is_read():
    make("saved/dataset_dict.json", content='{"splits": ["train", "test"]}')
    save_split("saved/train", "a.arrow")
    save_split("saved/test", "b.arrow")
    assert found("saved", "train") == ["saved/train/a.arrow"]
    assert found("saved", "test") == ["saved/test/b.arrow"]
    with pytest.raises(UserError, match="which has no split 'validation'; it has: test, train"):
        found("saved", "validation")


def test_what_datasets_itself_saves_is_found():
    import datasets

    datasets.Dataset.from_dict({"text": ["a", "b", "c"]}).save_to_disk("saved", num_shards=2)
    assert found("saved") == ["saved/data-00000-of-00002.arrow", "saved/data-00001-of-00002.arrow"]


@pytest.mark.parametrize("text", ["gsm8k", "openai/gsm8k", "org/data-v1.5", "a/b_c.d"])
def test_a_name_that_is_not_here_may_be_on_the_hub(text):
    assert find_local(text, key="data.path", split="train") is None


@pytest.mark.parametrize(
    "text", ["rows/a.jsonl", "rows.csv.gz", "rows.txt", "a/b/c", "./rows", "/rows", "~/rows", "rows/a.xlsx", r"a\b\c"]
)
def test_a_path_that_is_not_here_is_missing(text):
    with pytest.raises(UserError, match=r"^data\.path names the file '.*', which does not exist \(looked in '"):
        find_local(text, key="data.path", split="train")


def test_folders_and_patterns_without_rows_are_refused():
    make("docs/a.md", "docs/b.txt")
    for text, expected in (
        ("docs", "the folder 'docs': 2 files are there, none with rows"),
        ("docs/*", "the pattern 'docs/*': 2 files are there, none with rows"),
        ("docs/*.jsonl", "the pattern 'docs/*.jsonl': no file is there"),
    ):
        with pytest.raises(UserError) as caught:
            found(text)
        assert expected in str(caught.value)
        assert ".jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow, .feather" in str(caught.value)
