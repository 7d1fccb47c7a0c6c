from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from kedro.framework.hooks.manager import _create_hook_manager

from lm_tuning.errors import UserError
from lm_tuning.hooks.parameters import ParametersHook
from tests.parameters.conftest import Project


def context(project: Project, env: str | None = None, **runtime: object) -> SimpleNamespace:
    return SimpleNamespace(project_path=project.root, config_loader=project.loader(env, **runtime))


def test_wrong_parameters_stop_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    project = Project(tmp_path / "project")
    hook = ParametersHook()
    with pytest.raises(UserError, match=r"train\.max_steps = 0"):
        hook.after_context_created(context(project, train={"max_steps": 0}))
    with pytest.raises(UserError, match="There is no environment 'nope'"):
        hook.after_context_created(context(project, "nope"))


def test_relative_paths_mean_the_project_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    project = Project(tmp_path / "project")
    ParametersHook().after_context_created(context(project))
    assert Path.cwd() == project.root


def test_it_comes_before_every_other_hook_of_the_project() -> None:
    from kedro.framework.session.session import _register_hooks, _register_hooks_entry_points

    from lm_tuning import settings

    manager = _create_hook_manager()
    _register_hooks(manager, settings.HOOKS)
    _register_hooks_entry_points(manager, settings.DISABLE_HOOKS_FOR_PLUGINS)
    called_first = manager.hook.after_context_created.get_hookimpls()[-1]
    assert isinstance(called_first.plugin, ParametersHook)


def test_what_a_nearer_setting_replaces_is_gone_for_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    project = Project(tmp_path / "project")
    given = context(project, train={"effective_batch_rows": 8})
    with caplog.at_level("INFO", logger="lm_tuning"):
        ParametersHook().after_context_created(given)
    train = given.config_loader["parameters"]["train"]
    assert (train["effective_batch_rows"], train["effective_batch_tokens"]) == (8, None)
    assert (
        "train.effective_batch_rows = 8 (--params) takes the place of train.effective_batch_tokens = 512" in caplog.text
    )
