"""Digests follow content, not names, order or time stamps."""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path

import pytest

from lm_tuning.storage import digests
from lm_tuning.storage.digests import digest_file, digest_values


def write_settled(path: Path, content: bytes, age_seconds: float = 60.0) -> Path:
    path.write_bytes(content)
    stamp = path.stat().st_mtime - age_seconds
    os.utime(path, (stamp, stamp))
    return path


def test_file_digest_is_the_sha256_of_its_bytes(tmp_path: Path) -> None:
    path = write_settled(tmp_path / "a", b"one")
    assert digest_file(path) == hashlib.sha256(b"one").hexdigest()


def test_cached_file_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = write_settled(tmp_path / "a", b"one"), tmp_path / "cache" / "digests.json"
    digest = digest_file(path, cache)

    def fail(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(digests.hashlib, "file_digest", fail)
    assert digest_file(path, cache) == digest


def test_changed_file_is_read_again(tmp_path: Path) -> None:
    path, cache = write_settled(tmp_path / "a", b"one"), tmp_path / "digests.json"
    digest_file(path, cache)
    write_settled(path, b"two", age_seconds=50.0)
    assert digest_file(path, cache) == hashlib.sha256(b"two").hexdigest()


def test_file_that_was_just_written_is_not_cached(tmp_path: Path) -> None:
    path, cache = tmp_path / "a", tmp_path / "digests.json"
    path.write_bytes(b"one")
    digest_file(path, cache)
    stat = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert digest_file(path, cache) == hashlib.sha256(b"two").hexdigest()


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"x": 3}'])
def test_damaged_cache_is_rewritten(tmp_path: Path, damage: str) -> None:
    path, cache = write_settled(tmp_path / "a", b"one"), tmp_path / "digests.json"
    cache.write_text(damage)
    assert digest_file(path, cache) == hashlib.sha256(b"one").hexdigest()
    assert list(json.loads(cache.read_text())) == [str(path)]


def test_cache_forgets_files_that_are_gone(tmp_path: Path) -> None:
    first, second = write_settled(tmp_path / "a", b"one"), write_settled(tmp_path / "b", b"two")
    cache = tmp_path / "digests.json"
    digest_file(first, cache)
    first.unlink()
    digest_file(second, cache)
    assert list(json.loads(cache.read_text())) == [str(second)]


def test_values_digest_ignores_the_order_of_keys_only() -> None:
    digest = digest_values({"a": 1, "b": [1, 2]})
    assert digest == digest_values({"b": (1, 2), "a": 1})
    others = [{"a": 1, "b": [2, 1]}, {"a": 1.0, "b": [1, 2]}, {"a": True, "b": [1, 2]}, {"a": "1", "b": [1, 2]}]
    assert digest not in {digest_values(other) for other in others}
    assert len(digest) == 16


@pytest.mark.parametrize("value", [{1: "a"}, {"a": {None: 1}}, {"a": {1, 2}}, {"a": Path("x")}])
def test_values_that_json_would_bend_are_refused(value: object) -> None:
    with pytest.raises(TypeError):
        digest_values(value)


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        digest_values([math.nan])


def test_many_files_touch_the_cache_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / f"{number}.txt" for number in range(20)]
    for file in files:
        file.write_text(file.name)
        os.utime(file, (1_700_000_000, 1_700_000_000))
    writes: list[object] = []
    write = digests.write_json_atomic
    monkeypatch.setattr(digests, "write_json_atomic", lambda *given: (writes.append(given), write(*given)))
    cache = tmp_path / "cache.json"
    first = digests.digest_files(files, cache)
    assert first == [hashlib.sha256(file.name.encode()).hexdigest() for file in files]
    assert len(writes) == 1
    assert digests.digest_files(files, cache) == first
    assert len(writes) == 1
