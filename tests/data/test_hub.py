"""Data sets of the hub are read like files; a hub that is out of reach is told at once, and how to fix it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lm_tuning.data.readers.base import ReadSettings
from lm_tuning.data.readers.open import open_rows
from lm_tuning.data.settings import find_changed_sources
from lm_tuning.data.sources import remote as hub_source
from lm_tuning.data.sources.describe import describe_files
from lm_tuning.errors import Interrupted, UserError

COMMIT, OTHER = "1" * 40, "2" * 40
TURNS = [
    {"label": "pos", "turns": [{"role": "user", "args": {"city": "Busan"}}]},
    {"label": "neg", "turns": [{"role": "tool", "args": {"n": 3}}]},
]


class Hub:
    """The hub's client, answering from a folder of data files."""

    def __init__(self, folder: Path, read_folder: Callable[..., Any]) -> None:
        self.folder = folder
        self.read_folder = read_folder
        self.answers = True
        self.commit = COMMIT
        self.calls: list[Any] = []

    def dataset_info(self, name: str, *, revision: str | None, timeout: float) -> Any:
        self.calls.append(("info", name, revision))
        return SimpleNamespace(sha=self.commit)

    def load(self, name: str, config: str | None, *, split: str, revision: str | None) -> Any:
        self.calls.append(("load", name, config, split, revision))
        return self.read_folder(str(self.folder), config, split=split, cache_dir=str(self.folder.parent / "cache"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    import datasets
    import huggingface_hub

    monkeypatch.chdir(tmp_path)
    made = Hub(tmp_path / "files", datasets.load_dataset)
    made.folder.mkdir()
    monkeypatch.setattr(datasets, "load_dataset", made.load)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: made)
    monkeypatch.setattr(hub_source, "hub_answers", lambda: made.answers)
    return made


def write_split(hub: Hub, split: str, rows: list[Any]) -> None:
    (hub.folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_each_split_is_read_for_its_own_rows(hub):
    for split in ("train", "validation", "test"):
        write_split(hub, split, [{"text": f"{split} {number}"} for number in range(3)])
    described = describe_files(train="org/set", validation="org/set", test={"path": "org/set", "split": "train[:1]"})
    assert described["train"] == [
        {
            "path": "org/set",
            "format": "hub",
            "compression": None,
            "num_bytes": None,
            "digest": COMMIT,
            "config": None,
            "split": "train",
            "revision": None,
            "source": 0,
        }
    ]
    read = {split: [row for _, row in open_rows(described[split][0])] for split in ("train", "validation", "test")}
    assert read == {
        "train": [{"text": f"train {number}"} for number in range(3)],
        "validation": [{"text": f"validation {number}"} for number in range(3)],
        "test": [{"text": "train 0"}],
    }
    # Read at the commit that was described, under a name that no local folder and no file format can bear.
    assert hub.calls[3] == ("load", "hf://datasets/org/set", None, "train", COMMIT)


def test_nested_rows_are_read_by_path_and_exploded(hub):
    write_split(hub, "train", [{"id": n, "qas": [{"q": f"q{n}{k}"} for k in range(2)], "x": 0} for n in range(2)])
    (file,) = describe_files(train="set")["train"]
    source = open_rows(file, settings=ReadSettings(explode=("qas",)))
    source.add_paths(["qas.q", "qas.none"])
    assert source.columns == ["id", "qas", "x", "qas.q"]
    source.select(["qas.q"])
    assert [row["qas.q"] for _, row in source] == ["q00", "q01", "q10", "q11"]
    assert "'qas' has no key 'none' (its keys: 'q')" in source.explain_missing("qas.none")


def test_columns_progress_and_the_first_rows(hub):
    write_split(hub, "train", [{"a": number, "b": str(number)} for number in range(5)])
    (file,) = describe_files(train="set")["train"]
    source = open_rows(file)
    assert (source.name, source.format, source.columns, source.progress()) == ("set", "hub", ["a", "b"], (0, 5, "rows"))
    source.select(["b"])
    assert list(source) == [(number + 1, {"b": str(number)}) for number in range(5)]
    assert source.progress() == (5, 5, "rows")
    assert [number for number, _ in open_rows(file, settings=ReadSettings(max_rows=2))] == [1, 2]


def test_values_are_those_of_the_declared_features(hub):
    import datasets

    struct = {
        "role": datasets.Value("string"),
        "args": {"city": datasets.Value("string"), "n": datasets.Value("int64")},
    }
    features = datasets.Features({"label": datasets.ClassLabel(names=["neg", "pos"]), "turns": [struct]})
    datasets.Dataset.from_list(TURNS, features=features).to_parquet(hub.folder / "train.parquet")
    (file,) = describe_files(train="org/set")["train"]
    assert [row for _, row in open_rows(file)] == TURNS


def test_changes_of_hub_data_are_looked_for_without_asking_the_hub(hub):
    write_split(hub, "train", TURNS)
    stored = describe_files(train={"path": "org/set", "revision": "v1"})
    hub.answers, hub.commit = False, OTHER
    assert find_changed_sources(stored, train={"path": "org/set", "revision": "v1"}) == []
    assert find_changed_sources(stored, train="org/set") == [
        "rows of train: the stored splits were made from org/set (revision v1), the parameters say org/set"
    ]


def test_a_split_or_configuration_that_is_not_there_says_what_is(hub):
    write_split(hub, "train", TURNS)
    described = describe_files(train={"path": "org/set", "split": "dev"}, test={"path": "org/set", "config": "big"})
    with pytest.raises(UserError, match=r"lacks the split that is asked for: .*Unknown split \"dev\".*\['train'\]"):
        open_rows(described["train"][0])
    with pytest.raises(UserError, match=r"one configuration has to be chosen: .*'big' not found"):
        open_rows(described["test"][0])


def fail_with(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def hub_error(name: str, text: str) -> Exception:
    from huggingface_hub import errors

    made: Exception = getattr(errors, name)(text, response=SimpleNamespace(headers={}, request=None))
    return made


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "RepositoryNotFoundError",
            "which the hub does not have, or which is private. Check the name, and set HF_TOKEN",
        ),
        ("GatedRepoError", "which is gated: accept its terms on the hub, then set HF_TOKEN"),
        ("RevisionNotFoundError", "which has no such revision"),
        ("HfHubHTTPError", "which cannot be loaded: service is busy."),
    ],
)
def test_what_the_hub_refuses_is_told_before_anything_is_read(hub, monkeypatch, name, expected):
    monkeypatch.setattr(Hub, "dataset_info", fail_with(hub_error(name, "service is busy")))
    with pytest.raises(UserError) as caught:
        describe_files(train="a.jsonl", validation=["org/set"])
    assert caught.value.problems[0].startswith("data.path names the file 'a.jsonl', which does not exist")
    assert caught.value.problems[1].startswith("data.validation_path[0] names the hub data set org/set, which")
    assert expected in caught.value.problems[1]


def test_a_hub_out_of_reach_leaves_the_cache(hub, monkeypatch):
    import datasets

    hub.answers = False
    was_offline = datasets.config.HF_HUB_OFFLINE
    offline: list[bool] = []

    def look_into_cache(*_: Any, **__: Any) -> Any:
        offline.append(datasets.config.HF_HUB_OFFLINE)
        raise ConnectionError("Couldn't reach the Hugging Face Hub for dataset 'org/set'")

    monkeypatch.setattr(datasets, "load_dataset", look_into_cache)
    with pytest.raises(UserError) as caught:
        describe_files(train="org/set")
    assert offline == [True]
    assert datasets.config.HF_HUB_OFFLINE is was_offline
    (problem,) = caught.value.problems
    assert problem == (
        "data.path names the hub data set org/set, which is not in the local cache, and the hub cannot be reached. "
        "Connect to it (HF_HUB_OFFLINE must not be 1, HF_ENDPOINT names a mirror), or name a local file or folder. "
        "(There is no local file or folder of that name.)"
    )


def in_cache(hub: Hub, monkeypatch: pytest.MonkeyPatch, commit: str) -> None:
    """Let the library find the set in its cache, made from this commit."""
    import datasets

    dataset = datasets.Dataset.from_list([{"text": "a"}])
    monkeypatch.setattr(
        type(dataset), "cache_files", [{"filename": f"/cache/org___set/default/0.0.0/{commit}/a.arrow"}]
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: dataset)
    hub.answers = False


def test_the_cache_serves_without_the_hub_under_the_same_digest(hub, monkeypatch):
    in_cache(hub, monkeypatch, COMMIT)
    (file,) = describe_files(train={"path": "org/set", "revision": COMMIT})["train"]
    assert file["digest"] == COMMIT
    assert list(open_rows(file)) == [(1, {"text": "a"})]
    assert describe_files(train="org/set")["train"][0]["digest"] == COMMIT


def test_the_cache_does_not_stand_in_for_another_revision(hub, monkeypatch, tmp_path):
    from huggingface_hub import constants

    in_cache(hub, monkeypatch, OTHER)
    for revision in (COMMIT, "v1"):
        with pytest.raises(
            UserError, match=f"at {revision}, which the hub does not give .* the cache has it at {OTHER}"
        ):
            describe_files(train={"path": "org/set", "revision": revision})
    note = tmp_path / "datasets--org--set" / "refs" / "v1"
    note.parent.mkdir(parents=True)
    note.write_text(OTHER)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert describe_files(train={"path": "org/set", "revision": "v1"})["train"][0]["digest"] == OTHER


def test_an_empty_split_and_a_program_are_refused(hub, monkeypatch):
    import datasets

    (file,) = describe_files(train="org/set")["train"]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_dict({"a": []}))
    with pytest.raises(UserError, match="The split 'train' of the hub data set org/set has no rows"):
        open_rows(file)
    monkeypatch.setattr(datasets, "load_dataset", fail_with(RuntimeError("Dataset scripts are no longer supported")))
    with pytest.raises(UserError, match="which consists of a program"):
        open_rows(file)


def test_a_request_to_stop_is_no_problem_of_the_data_set(hub, monkeypatch):
    monkeypatch.setattr(Hub, "dataset_info", fail_with(Interrupted("SIGTERM")))
    with pytest.raises(Interrupted):
        describe_files(train="org/set")


def test_the_hub_is_asked_once_and_never_in_offline_mode(monkeypatch):
    import huggingface_hub
    from huggingface_hub import constants

    asked: list[Any] = []

    class Session:
        def head(self, address: str, *, timeout: float) -> None:
            asked.append((address, timeout))
            raise OSError("no route")

    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert hub_source.hub_answers() is False
    assert asked == [(constants.ENDPOINT, hub_source.HUB_SECONDS)]
    with pytest.raises(
        UserError, match=r"data\.path names 'hf://datasets/o/s/a.csv', on the hub, which cannot be reached"
    ):
        describe_files(train="hf://datasets/o/s/a.csv")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked.clear()
    assert hub_source.hub_answers() is False
    assert asked == []
