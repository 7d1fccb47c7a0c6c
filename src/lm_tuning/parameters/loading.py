"""Parameters from Kedro's configuration loader: read, checked, and the same in parameters and catalog."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lm_tuning.errors import UserError
from lm_tuning.parameters.root import Parameters
from lm_tuning.parameters.sources import Sources
from lm_tuning.parameters.unreadable import describe_unreadable
from lm_tuning.parameters.validation import validate_parameters

if TYPE_CHECKING:
    from kedro.config import AbstractConfigLoader, OmegaConfigLoader


def load_parameters(config_loader: AbstractConfigLoader, root: Path) -> Parameters:
    """Read and check all parameters of an environment, with those of the command line on top.

    Args:
        config_loader: the ``OmegaConfigLoader`` of the session, which knows the configuration folder, the environment
            and the runtime parameters.
        root: project folder, which places in messages are told from.

    Raises:
        UserError: with all problems at once: a missing environment, an unreadable file, wrong parameters.
    """
    loader = cast("OmegaConfigLoader", config_loader)
    raw = _read(loader, "parameters", root)
    names = dict.fromkeys([loader.env or loader.default_run_env, loader.base_env])
    folders = tuple(Path(loader.conf_source) / name for name in names)
    sources = Sources(runtime=loader.runtime_params or {}, folders=folders, root=root)
    problems = _check_output(raw, loader, sources)
    try:
        parameters = validate_parameters(raw, sources)
    except UserError as error:
        raise UserError([*error.problems, *problems]) from error
    if problems:
        raise UserError(problems)
    return parameters


def _read(config_loader: OmegaConfigLoader, key: str, root: Path) -> dict[str, Any]:
    """Read one kind of configuration, turning what the loader raises into sentences."""
    import yaml
    from kedro.config import MissingConfigException
    from omegaconf.errors import OmegaConfBaseException

    try:
        return dict(config_loader[key])
    except MissingConfigException as error:
        raise UserError(_describe_missing(config_loader, root)) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        names = (config_loader.env or config_loader.default_run_env, config_loader.base_env)
        folders = [Path(config_loader.conf_source) / name for name in names]
        raise UserError(describe_unreadable(error, folders, root) or f"The {key} cannot be read: {error}") from error
    except OmegaConfBaseException as error:
        hint = "Where ${ is meant as text, write \\${."
        raise UserError(f"The {key} cannot be put together: {str(error).splitlines()[0]} {hint}") from error
    except ValueError as error:
        raise UserError(f"The {key} cannot be read: {error}") from error
    except AttributeError as error:
        raise UserError(f"The {key} cannot be read: the top level of a file must be keys with values.") from error


def _describe_missing(config_loader: OmegaConfigLoader, root: Path) -> str:
    """Say which environment folder is missing and which ones are there."""
    conf = Path(config_loader.conf_source)
    name = config_loader.env or config_loader.default_run_env
    folder = conf / name
    shown = folder.relative_to(root) if folder.is_relative_to(root) else folder
    if folder.is_dir():
        return f"No parameters are found in {conf / config_loader.base_env} or {folder}."
    there = (
        sorted(item.name for item in conf.iterdir() if item.is_dir() and item.name != config_loader.base_env)
        if conf.is_dir()
        else []
    )
    if config_loader.env is None:
        return f"The folder {shown} is missing. It may be empty: mkdir -p {shown}"
    return f"There is no environment {name!r}: the folder {shown} is missing. Environments here: {', '.join(there)}."


def _check_output(raw: Mapping[str, Any], config_loader: OmegaConfigLoader, sources: Sources) -> list[str]:
    """Refuse an ``output`` that the catalog does not know of: results would go to another experiment's folder."""
    from kedro.config import MissingConfigException

    try:
        shared = config_loader["globals"].get("output")
    except MissingConfigException:
        shared = None
    folder = (config_loader.runtime_params or {}).get("output", shared)
    named = raw.get("output")
    if named == folder:
        return []
    source = sources.find(("output",))
    place = f" [{source.place}]" if source else ""
    return [
        f"output = {named!r} in the parameters, but the catalog writes to the folders of {folder!r}, since it reads "
        f"globals.yml alone. Set it in the environment's globals.yml (output: {named}) and leave it out of the "
        f"parameters.{place}"
    ]
