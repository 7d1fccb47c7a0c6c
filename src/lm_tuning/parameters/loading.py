"""Parameters from Kedro's configuration loader: read, checked, and the same in parameters and catalog.

What is set in the nearer layer wins; the text behind ``--params`` is read with the declared types in mind.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from lm_tuning.errors import UserError
from lm_tuning.json_types import JsonObject, JsonValue
from lm_tuning.parameters.groups import Parameters
from lm_tuning.parameters.schema import accepts, find_entry
from lm_tuning.parameters.sources import (
    Sources,
    describe_numeral,
    describe_unreadable,
    find_numerals,
    find_unread_files,
    find_unread_globals,
    is_other_base,
    show_path,
)
from lm_tuning.parameters.validation import validate_parameters
from lm_tuning.secrets import is_secret_name, remember

if TYPE_CHECKING:
    from kedro.config import AbstractConfigLoader, OmegaConfigLoader
    from omegaconf.errors import OmegaConfBaseException


# Of each set one alternative can hold. Layers, the nearest first: --params, the environment's folder, conf/base.
_ALTERNATIVES: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("train.effective_batch_rows",), ("train.effective_batch_tokens",)),
    (
        ("data.columns.text",),
        ("data.columns.prompt", "data.columns.response", "data.columns.system"),
        ("data.columns.messages", "data.columns.tools"),
    ),
    (("split.num_folds",), ("data.validation_path",)),
)


def settle_alternatives(raw: JsonObject, sources: Sources) -> tuple[JsonObject, list[str]]:
    """Remove settings that one in a nearer layer replaces.

    ``conf/base`` sets ``train.effective_batch_tokens``; a user who sets ``train.effective_batch_rows`` on top means it
    instead. Two alternatives in one layer are left as they are: that is a contradiction, told by the checks.

    Args:
        raw: the merged parameters as plain values, by group and key.
        sources: where they were written.

    Returns:
        The parameters, with null in place of what was replaced, and a line for each replacement.
    """
    settled, lines = dict(raw), []
    for alternatives in _ALTERNATIVES:
        chosen = [[key for key in keys if _value(settled, key) is not None] for keys in alternatives]
        layers = [min((sources.layer(key.split(".")) for key in keys), default=None) for keys in chosen]
        known = [layer for layer in layers if layer is not None]
        # One alternative alone is no question, and two in the nearest layer are a contradiction that nobody can settle.
        if len(known) < 2 or known.count(min(known)) > 1:
            continue
        nearest = layers.index(min(known))
        winner = chosen[nearest][0]
        for keys in (keys for position, keys in enumerate(chosen) if position != nearest):
            for key in keys:
                lines.append(
                    f"{_show(settled, winner, sources)} takes the place of {_show(settled, key, sources)}: only one of "
                    "them can hold."
                )
                _set_null(settled, key)
    return settled, lines


def _value(raw: JsonObject, key: str) -> JsonValue:
    value: JsonValue = raw
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _show(raw: JsonObject, key: str, sources: Sources) -> str:
    source = sources.find(key.split("."))
    return f"{key} = {_value(raw, key)}" + (f" ({source.location})" if source else "")


def _set_null(raw: JsonObject, key: str) -> None:
    """Set a key to None in copies of its groups, since the configuration loader keeps the groups themselves."""
    *groups, last = key.split(".")
    for group in groups:
        inner = raw[group]
        assert isinstance(inner, dict), "a key of it has a value"
        copied = dict(inner)
        raw[group] = copied
        raw = copied
    raw[last] = None


def load_parameters(config_loader: AbstractConfigLoader, root: Path) -> Parameters:
    """Read and check all parameters of an environment, with those of the command line on top.

    Args:
        config_loader: the ``OmegaConfigLoader`` of the session, which knows the configuration folder, the environment
            and the runtime parameters.
        root: project folder, which paths in messages are relative to.

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
    raw: JsonObject
    replaced: list[str]
    warnings: list[str]


def read_settled(config_loader: AbstractConfigLoader, root: Path) -> Settled:
    """Read and check all parameters, and say what was replaced on the way.

    Args:
        config_loader: see :func:`load_parameters`.
        root: project folder, which paths in messages are relative to.

    Raises:
        UserError: with all problems at once, see :func:`load_parameters`; also files and keys that nobody reads.
    """
    loader = cast("OmegaConfigLoader", config_loader)
    merged = _read(loader, root)
    folders = _folders(loader)
    sources = Sources(runtime=loader.runtime_params or {}, folders=folders, root=root)
    raw, replaced = settle_alternatives(merged, sources)
    unread, warnings = find_unread_files(sources, Path(loader.conf_source), loader.config_patterns)
    # People keep their own paths there, and wonder why another environment does not have them.
    own = Path(loader.conf_source) / loader.default_run_env
    if own not in folders and any(own.glob("*.yml")):
        warnings.append(f"{show_path(own, root)} is not read, since --env reads another folder instead.")
    problems = [
        *_check_output(raw, loader, sources),
        *unread,
        *find_unread_globals(sources, _globals(loader)),
        *find_numerals(sources),
    ]
    # Wrong parameters first: they are what a user has most likely just written.
    try:
        parameters = validate_parameters(raw, sources)
    except UserError as error:
        raise UserError([*error.problems, *problems]) from error
    if problems:
        raise UserError(problems)
    return Settled(parameters, raw, replaced, warnings)


def _folders(config_loader: OmegaConfigLoader) -> tuple[Path, ...]:
    """Return the folders in use, the nearest first; one where the environment is the base."""
    names = dict.fromkeys([config_loader.env or config_loader.default_run_env, config_loader.base_env])
    return tuple(Path(config_loader.conf_source) / name for name in names)


def _globals(config_loader: OmegaConfigLoader) -> JsonObject:
    """Return what ``globals.yml`` sets, nothing where there is none."""
    from kedro.config import MissingConfigException

    try:
        return dict(config_loader["globals"])
    except MissingConfigException:
        return {}


def _read(config_loader: OmegaConfigLoader, root: Path) -> JsonObject:
    """Read the parameters, turning what the loader raises into sentences."""
    import yaml
    from kedro.config import MissingConfigException
    from omegaconf.errors import OmegaConfBaseException

    try:
        return dict(config_loader["parameters"])
    except MissingConfigException as error:
        raise UserError(_describe_missing(config_loader, root)) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(
            describe_unreadable(error, _folders(config_loader), root) or f"The parameters cannot be read: {error}"
        ) from error
    except OmegaConfBaseException as error:
        raise UserError(f"The parameters cannot be put together: {_explain(error)}") from error
    except ValueError as error:
        raise UserError(f"The parameters cannot be read: {error}") from error
    except AttributeError as error:  # the loader asks a list for its keys
        raise UserError("The parameters cannot be read: the top level of a file must be keys with values.") from error


def _explain(error: OmegaConfBaseException) -> str:
    """Explain in sentences why files and the command line do not go together."""
    from omegaconf.errors import GrammarParseError, InterpolationResolutionError, KeyValidationError

    sentence = f"{str(error).splitlines()[0].rstrip('. ')}."
    if isinstance(error, InterpolationResolutionError | GrammarParseError):
        return f"{sentence} Where ${{ is meant as text, write \\${{."
    if isinstance(error, KeyValidationError):
        return (
            f"{error.full_key}: {sentence} A number is a key of its own in YAML, and --params has keys of text only: "
            'put such keys in quotes in the file, as in "1": 2.0.'
        )
    return sentence


def _describe_missing(config_loader: OmegaConfigLoader, root: Path) -> str:
    """Describe which environment folder is missing and which ones are there."""
    conf = Path(config_loader.conf_source)
    name = config_loader.env or config_loader.default_run_env
    folder = conf / name
    shown = show_path(folder, root)
    if folder.is_dir():
        return f"No parameters are found in {conf / config_loader.base_env} or {folder}."
    if config_loader.env is None:
        return f"The folder {shown} is missing. It may be empty: mkdir -p {shown}"
    there = sorted(item.name for item in conf.glob("*") if item.is_dir() and item.name != config_loader.base_env)
    return f"There is no environment {name!r}: the folder {shown} is missing. Environments here: {', '.join(there)}."


def _check_output(raw: JsonObject, config_loader: OmegaConfigLoader, sources: Sources) -> list[str]:
    """Refuse an ``output`` that the catalog does not know of: results would go to another experiment's folder."""
    shared = _globals(config_loader).get("output")
    # As conf/base/catalog.yml reads it: ${runtime_params:output, ${globals:output}}.
    folder = (config_loader.runtime_params or {}).get("output", shared)
    named = raw.get("output")
    if named == folder:
        return []
    source = sources.find(("output",))
    location = f" [{source.location}]" if source else ""
    return [
        f"output = {named!r} in the parameters, but the catalog writes to the folders of {folder!r}, since it reads "
        f"globals.yml alone. Set it in the environment's globals.yml (output: {named}) and leave it out of the "
        f"parameters.{location}"
    ]


_CLOSING = {"[": "]", "{": "}"}


def parse_parameters(text: str) -> JsonObject:
    r"""Read ``group.key=value,group.key=value`` into nested groups.

    Values are YAML, except that a key that wants text keeps what was typed where YAML would make something else of it:
    ``model.revision=01`` is ``"01"``, and ``data.columns.label=no`` is ``"no"``. Commas inside brackets, braces or
    quotes do not end a value: ``train.lora.target_modules=[q_proj,v_proj]``.

    Raises:
        ValueError: when a part has no ``=`` or no key, or a value is not YAML.
    """
    from omegaconf import OmegaConf
    from yaml import YAMLError

    parsed = OmegaConf.create()
    for item in split_items(text):
        key, equals, value = item.partition("=")
        key = key.strip()
        # A key that exists is masked by its name wherever it is shown.
        if find_entry(key.split(".")) is None and is_secret_name(key.rpartition(".")[2]):
            remember([value.strip(), value.strip().strip("'\"")])  # a mistyped key; the error log holds its value
        if not equals or not key:
            raise ValueError(
                f"{item!r} is not of the form key=value; a list needs brackets, and text with commas needs quotes "
                "inside the shell's: --params 'a.b=[x,y],c.d=\"one, two\"'"
            )
        try:
            read: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))
        except YAMLError as error:
            raise ValueError(f"{item!r} cannot be read as YAML; put the value in quotes") from error
        # OmegaConf's own reader of dotted lists, so that a value means here what it means in a file.
        kept = _keep_text(key, value.strip(), read["value"])
        if not isinstance(kept, str) and is_other_base(value):
            raise ValueError(f"{item}: {describe_numeral(value.strip())}")
        OmegaConf.update(parsed, key, kept, force_add=True)
    groups: Any = OmegaConf.to_container(parsed)
    return dict(groups)


def _keep_text(key: str, typed: str, read: JsonValue) -> JsonValue:
    """Return what was typed where the key wants text and YAML read something else."""
    entry = find_entry(key.split("."))
    if not entry or isinstance(read, (str, dict, list)) or accepts(entry, read) or not accepts(entry, typed):
        return read
    return typed


def split_items(text: str) -> list[str]:
    """Split at commas outside brackets, braces and quotes; a quote counts only where a value or an item starts."""
    # A split at every comma, as Kedro's, would tear lists apart; a YAML reader wants the whole to be YAML.
    items: list[str] = []
    expected: list[str] = []  # the brackets that are open, innermost last
    start, quote = 0, ""
    opens_value = False
    for position, letter in enumerate(text):
        if quote:
            # Only double quotes know escapes in YAML.
            if letter == quote and (quote == "'" or text[position - 1] != "\\"):
                quote = ""
            continue
        if letter in "'\"" and opens_value:
            quote = letter
        elif letter in _CLOSING and (opens_value or expected):
            expected.append(_CLOSING[letter])
        elif expected and letter == expected[-1]:
            expected.pop()
        elif letter == "," and not expected:
            items.append(text[start:position].strip())
            start = position + 1
        # An apostrophe within a word is none of these: it's.
        if not letter.isspace():
            opens_value = letter in "=[{:," and (letter == "=" or bool(expected))
    items.append(text[start:].strip())
    return [item for item in items if item]
