"""MLflow's database is made whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lm_tuning.tracking.address import make_database
from lm_tuning.tracking.trouble import describe, strip_passwords


def test_a_database_that_was_not_finished_leaves_no_file_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.store.tracking import sqlalchemy_store
    from mlflow.tracking import MlflowClient

    path = tmp_path / "store" / "mlflow.db"
    real: Any = sqlalchemy_store.SqlAlchemyStore

    def break_off(uri: str, artifacts: str) -> None:
        Path(uri.removeprefix("sqlite:///")).write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sqlalchemy_store, "SqlAlchemyStore", break_off)
        with pytest.raises(KeyboardInterrupt):
            make_database(f"sqlite:///{path}")
    assert not path.exists()
    assert sqlalchemy_store.SqlAlchemyStore is real

    make_database(f"sqlite:///{path}")
    assert [each.name for each in path.parent.iterdir()] == ["mlflow.db"], "what was left is gone"
    client = MlflowClient(tracking_uri=f"sqlite:///{path}")
    assert client.get_run(client.create_run("0").info.run_id).info.status == "RUNNING"


@pytest.mark.parametrize("uri", ["sqlite://", "sqlite:///:memory:", "http://localhost:5000", "postgresql://h/db"])
def test_other_stores_are_left_alone(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_database(uri)
    assert list(tmp_path.iterdir()) == []


def test_a_half_made_database_is_called_so() -> None:
    error = RuntimeError("(sqlite3.OperationalError) table _alembic_tmp_experiments already exists")
    assert "half made" in describe(error)


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("postgresql://dbu:pa/ssW0rd@127.0.0.1:9/db", "postgresql://127.0.0.1:9/db"),
        ("http://u:p@host:5000/x", "http://host:5000/x"),
        ("sqlite:////a/b@c.db", "sqlite:////a/b@c.db"),
    ],
)
def test_addresses_are_shown_without_passwords(uri: str, shown: str) -> None:
    assert strip_passwords(uri) == shown
