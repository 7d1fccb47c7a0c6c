"""Parameters from Kedro's configuration loader: read, checked, and the same in parameters and catalog."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from lm_tuning.errors import UserError
from lm_tuning.parameters.layers import settle_alternatives
from lm_tuning.parameters.numerals import find_numerals
from lm_tuning.parameters.root import Parameters
from lm_tuning.parameters.sources import Sources
from lm_tuning.parameters.unread import find_unread_files, find_unread_globals
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
    return read_settled(config_loader, root).parameters


class Settled(NamedTuple):
    """Parameters as a run gets them.

    Attributes:
        parameters: checked.
        raw: the same as plain values, by group and key, for Kedro.
        replaced: a line for each setting that one in a nearer layer took the place of.
        warnings: what is odd in the configuration folders and no mistake for sure.
    """

    parameters: Parameters
    raw: dict[str, Any]
    replaced: list[str]
    warnings: list[str]


def read_settled(config_loader: AbstractConfigLoader, root: Path) -> Settled:
    """Read and check all parameters, and say what was replaced on the way.

    Args:
        config_loader: see :func:`load_parameters`.
        root: project folder, which places in messages are told from.

    Raises:
        UserError: with all problems at once, see :func:`load_parameters`; also files and keys that nobody reads.
    """
    loader = cast("OmegaConfigLoader", config_loader)
    merged = _read(loader, "parameters", root)
    names = dict.fromkeys([loader.env or loader.default_run_env, loader.base_env])
    folders = tuple(Path(loader.conf_source) / name for name in names)
    sources = Sources(runtime=loader.runtime_params or {}, folders=folders, root=root)
    raw, replaced = settle_alternatives(merged, sources)
    unread, warnings = find_unread_files(Path(loader.conf_source), folders, loader.config_patterns, root)
    own = Path(loader.conf_source) / loader.default_run_env
    if own not in folders and any(own.glob("*.yml")):
        warnings.append(f"{sources.show(own)} is not read, since --env takes another folder in its place.")
    problems = [
        *_check_output(raw, loader, sources),
        *unread,
        *find_unread_globals(folders, _globals(loader), root),
        *find_numerals(sources),
    ]
    try:
        parameters = validate_parameters(raw, sources)
    except UserError as error:
        raise UserError([*error.problems, *problems]) from error
    if problems:
        raise UserError(problems)
    return Settled(parameters, raw, replaced, warnings)


def _globals(config_loader: OmegaConfigLoader) -> dict[str, Any]:
    """Return what ``globals.yml`` sets, nothing where there is none."""
    from kedro.config import MissingConfigException

    try:
        return dict(config_loader["globals"])
    except MissingConfigException:
        return {}


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
    shared = _globals(config_loader).get("output")
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
