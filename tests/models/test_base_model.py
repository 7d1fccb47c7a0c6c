"""The base model is pinned by content, so that what was made from it is reused exactly as long as that is right."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lm_tuning.errors import UserError
from lm_tuning.models import base_model
from lm_tuning.models.base_model import describe_base_model
from tests.support.tiny import save_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model")


def test_a_folder_is_described_by_its_content(folder, tmp_path):
    described = describe_base_model(str(folder), digest_cache=tmp_path / "digests.json")
    assert described == {
        "name_or_path": folder.as_posix(),
        "revision": None,
        "digest": described["digest"],
        "tokenizer_digest": described["tokenizer_digest"],
        "trust_remote_code": False,
        "is_embedded": False,
    }
    copy = shutil.copytree(folder, tmp_path / "copy")
    again = describe_base_model(str(copy), digest_cache=tmp_path / "digests.json")
    assert again["digest"] == described["digest"]
    assert again["tokenizer_digest"] == described["tokenizer_digest"]


@pytest.mark.parametrize(
    ("name", "digest_changes", "tokenizer_digest_changes"),
    [
        ("config.json", True, False),
        ("model.safetensors", True, False),
        ("chat_template.jinja", False, True),
        ("tokenizer.json", False, True),
        ("README.md", False, False),
    ],
)
def test_digests_change_with_what_they_stand_for(folder, name, digest_changes, tokenizer_digest_changes):
    before = describe_base_model(str(folder))
    path = folder / name
    content = path.read_bytes() if path.exists() else b""
    # Weights cannot grow without being damaged, so one of them changes.
    path.write_bytes(content[:-1] + b"\x07" if name == "model.safetensors" else content + b"\n")
    after = describe_base_model(str(folder))
    assert (after["digest"] != before["digest"]) is digest_changes
    assert (after["tokenizer_digest"] != before["tokenizer_digest"]) is tokenizer_digest_changes


def test_all_that_is_missing_is_said_together(folder):
    (folder / "model.safetensors").unlink()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError) as error:
        describe_base_model(str(folder))
    assert [problem.split(": looked")[0].split()[-1] for problem in error.value.problems] == ["weights", "tokenizer"]


def test_a_folder_has_no_revision(folder):
    with pytest.raises(UserError, match=r"model\.revision is 'main'.* is a folder"):
        describe_base_model(str(folder), revision="main")


def test_a_hub_model_is_pinned_by_its_commit(monkeypatch, tmp_path):
    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--owner--name" / "snapshots" / commit
    save_tiny_model(snapshot)
    refs = tmp_path / "models--owner--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    described = describe_base_model("owner/name", trust_remote_code=True)
    assert described["revision"] == described["digest"] == described["tokenizer_digest"] == commit
    assert described["name_or_path"] == "owner/name"
    assert described["trust_remote_code"]


def test_the_default_model_is_made_when_it_is_asked_for(monkeypatch, tmp_path, caplog):
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    asked = []

    def convert(folder: Path, **_: object) -> tuple[Path, bool]:
        asked.append(folder)
        reused = folder.exists()
        save_tiny_model(folder)
        return folder, reused

    monkeypatch.setattr(base_model, "convert_embedded_model", convert)
    name = "data/06_models/base/SmolLM2-135M-Instruct"
    assert describe_base_model(name)["is_embedded"]
    assert asked == [Path(name)]
    assert "Default model converted to" in caplog.text
    describe_base_model(name)
    assert "Default model reused" in caplog.text


def test_describing_a_folder_imports_neither_torch_nor_transformers(folder):
    code = (
        "import sys; from lm_tuning.models.base_model import describe_base_model;"
        f"describe_base_model({str(folder)!r}); print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.replace("'", '"')) == []
