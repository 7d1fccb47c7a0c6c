"""Commands of this project: ``run`` with messages for people, ``parameters`` and ``schema``."""

from __future__ import annotations

import copy
import functools
import logging
import os
import shlex
import sys
import traceback
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from kedro.framework.cli.project import run as kedro_run
from kedro.framework.cli.utils import env_option
from kedro.utils import find_kedro_project

from lm_tuning.errors import GateNotReached, Interrupted, UserError, causes_of
from lm_tuning.json_types import JsonObject
from lm_tuning.runtime.log_records import protect, protect_tracebacks
from lm_tuning.runtime.stopping import signals_of_a_command
from lm_tuning.secrets import mask_values
from lm_tuning.tracking.sender import holds_up_the_end

if TYPE_CHECKING:
    from kedro.framework.startup import ProjectMetadata

USER_ERROR_EXIT_CODE = 2
GATE_EXIT_CODE = 3
# As shells have it: 128 and the signal's number.
EXIT_CODE_OF_SIGNAL = {"SIGINT": 130, "SIGTERM": 143}
ERROR_LOG = Path("logs/errors.log")


@click.group(name="lm_tuning")
def cli() -> None:
    """Commands of LM Tuning."""


def find_user_error(error: BaseException | None) -> UserError | None:
    """Return what a user can fix in an error.

    Kedro wraps what datasets raise and keeps the original as the cause. Of its own errors, those about parameters and
    about configuration files that are missing or no YAML count too: they name the file.
    """
    import yaml
    from kedro.config import MissingConfigException
    from kedro.validation.exceptions import ParameterValidationError

    for cause in causes_of(error):
        if isinstance(cause, UserError):
            return cause
        if isinstance(cause, yaml.YAMLError | UnicodeDecodeError):
            from lm_tuning.parameters.sources import describe_unreadable

            root = Path(find_kedro_project(Path.cwd()) or Path.cwd())
            unreadable = describe_unreadable(cause, [root / "conf"], root)
            if unreadable or isinstance(cause, yaml.YAMLError):
                return UserError(unreadable or str(cause).splitlines())
        if isinstance(cause, ParameterValidationError | MissingConfigException):
            return UserError(str(cause).splitlines())
    return None


def find_interruption(error: BaseException | None) -> Interrupted | None:
    """Return the request to stop that ended a run, if that is what ended it."""
    return next((cause for cause in causes_of(error) if isinstance(cause, Interrupted)), None)


def explain_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """Print what a user can fix and nothing else; leave every other error to Kedro, with its traceback.

    Exit codes: 2 for a user error, 3 for a model that does not reach ``evaluate.gate``, 130 and 143 for a run stopped
    by SIGINT and SIGTERM, 1 for any other error.
    """

    @functools.wraps(command)
    def explained(*args: Any, **options: Any) -> Any:
        try:
            answer = command(*args, **options)
        except GateNotReached as reason:
            for missed in reason.missed:
                click.secho(protect(missed), fg="yellow", err=True)
            click.secho("All results are kept, and the run in MLflow is finished.", dim=True, err=True)
            _exit(GATE_EXIT_CODE)
        except KeyboardInterrupt:
            click.secho("Stopped by SIGINT.", fg="yellow", err=True)
            _exit(EXIT_CODE_OF_SIGNAL["SIGINT"])
        except Exception as error:
            interruption = find_interruption(error)
            if interruption is not None:
                click.secho(protect(str(interruption)), fg="yellow", err=True)
                _exit(EXIT_CODE_OF_SIGNAL.get(interruption.signal_name, EXIT_CODE_OF_SIGNAL["SIGINT"]))
            user_error = find_user_error(error)
            if user_error is None:
                protect_tracebacks()
                raise
            for problem in user_error.problems:
                click.secho(protect(problem), fg="red", err=True)
            click.secho(f"(traceback: {_keep_traceback(error)})", dim=True, err=True)
            _exit(USER_ERROR_EXIT_CODE)
        if holds_up_the_end():
            _exit(0)
        return answer

    return explained


def _exit(code: int) -> NoReturn:
    """End the command; at once where the interpreter would first wait for a tracking store that does not answer."""
    if holds_up_the_end():
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _keep_traceback(error: BaseException) -> str:
    """Append the traceback to the project's error log and say where that is, or why it is nowhere."""
    path = Path(find_kedro_project(Path.cwd()) or Path.cwd()) / ERROR_LOG
    try:
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            command = protect(shlex.join(["kedro", *sys.argv[1:]])).replace("\n", "\\n")
            file.write(f"{datetime.now().astimezone().isoformat(timespec='seconds')} {command}\n")
            file.write(protect("".join(traceback.format_exception(error))) + "\n")
    except OSError as reason:
        return f"not kept, {reason}"
    return os.path.relpath(path)


def _is_unexplained(record: logging.LogRecord) -> bool:
    """Return whether Kedro's runner may log about a failing node, and how to resume: not where we explain the end."""
    error = sys.exc_info()[1]
    return find_user_error(error) is None and find_interruption(error) is None


def _read_params(context: click.Context, option: click.Parameter, value: Any) -> JsonObject:
    """Read ``--params``; a configuration file behind ``--config`` gives groups already."""
    from lm_tuning.parameters.loading import parse_parameters

    if isinstance(value, dict):
        return value
    try:
        return parse_parameters(value or "")
    except ValueError as error:
        raise click.BadParameter(protect(str(error)), ctx=context, param=option) from error


@explain_errors
def _run(**options: Any) -> Any:
    """Run pipelines as Kedro does, with both spellings of the option and checked names."""
    if options["pipeline"] and options["pipelines"]:
        raise UserError("Give --pipelines or --pipeline, which is its older spelling, not both.")
    if options["pipeline"]:
        options |= {"pipeline": None, "pipelines": [options["pipeline"]]}
    _check_pipeline_names(options["pipelines"])
    for name in ("kedro.pipeline.node", "kedro.runner.sequential_runner", "kedro.runner.thread_runner"):
        logging.getLogger(name).addFilter(_is_unexplained)
    assert kedro_run.callback is not None
    with signals_of_a_command():
        return kedro_run.callback(**options)


def _check_pipeline_names(names: list[str]) -> None:
    """Refuse a mistyped pipeline before anything starts."""
    from kedro.framework.project import pipelines

    unknown = [name for name in names if name not in pipelines]
    if unknown:
        known = ", ".join(sorted(name for name in pipelines if name != "__default__"))
        raise UserError([f"There is no pipeline {name!r}. Pipelines: {known}." for name in unknown])


# Kedro's own command with every option it has; only --params is read by us.
_options = {str(option.name): copy.copy(option) for option in kedro_run.params}
_options["params"].callback = _read_params
run = click.Command(
    "run",
    callback=_run,
    params=list(_options.values()),
    help="""Run pipelines: all of them, or those named by --pipelines.

    A wrong parameter, row or file ends the run with exit code 2 and the problems alone; a model that does not reach
    evaluate.gate ends it with exit code 3, after all results are kept.""",
)
cli.add_command(run)


@cli.command()
@env_option
@click.option("--params", callback=_read_params, help="Values on top, as for run: group.key=value,group.key=value.")
@click.pass_obj
@explain_errors
def parameters(metadata: ProjectMetadata, env: str | None, params: JsonObject) -> None:
    """Check all parameters of an environment and print them as a run would get them, secrets masked."""
    import yaml
    from kedro.framework.project import settings

    from lm_tuning.parameters.loading import load_parameters

    root = metadata.project_path
    loader = settings.CONFIG_LOADER_CLASS(
        conf_source=str(root / settings.CONF_SOURCE),
        env=env or os.environ.get("KEDRO_ENV"),
        runtime_params=params,
        **settings.CONFIG_LOADER_ARGS,
    )
    resolved = mask_values(load_parameters(loader, root).model_dump())
    click.echo(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True), nl=False)


@cli.command()
@click.option("--check", is_flag=True, help="Write nothing; fail when a file is out of date.")
@click.pass_obj
@explain_errors
def schema(metadata: ProjectMetadata, check: bool) -> None:
    """Write the JSON schema (for editors) and the reference page of the parameters to docs/reference.

    In the sources of this project, also what the installed transformers takes as arguments of schedules and optimizers.
    """
    from lm_tuning.parameters.schema import editor_schema, render_reference
    from lm_tuning.parameters.trainer_arguments import TABLE_FILE

    folder = metadata.project_path / "docs" / "reference"
    texts = {folder / "parameters.schema.json": editor_schema(), folder / "parameters.md": render_reference()}
    # Of an installed package, in .venv for one, the table belongs to its release. Reading it again takes seconds, for
    # transformers.
    if TABLE_FILE.is_relative_to(metadata.source_dir):
        from lm_tuning.training.transformers_table import render_table

        texts[TABLE_FILE] = render_table()
    stale = [path for path, text in texts.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if check and stale:
        raise UserError([f"{path} is out of date. Write it again: kedro schema" for path in stale])
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts[path], encoding="utf-8")
        click.echo(f"wrote {path}")
    if not stale:
        click.echo(f"{folder} is up to date")


@cli.command()
@env_option
@click.option("--params", callback=_read_params, help="Values on top, as for run: group.key=value,group.key=value.")
@click.option("--model", type=click.Choice(["tuned", "base", "both"]), default="tuned", help="Who answers.")
@click.option("--system", help="What stands before all questions.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="Longest answer; else generate.generation says so.")
@click.pass_obj
@explain_errors
def chat(
    metadata: ProjectMetadata,
    env: str | None,
    params: JsonObject,
    *,
    model: str,
    system: str | None,
    max_new_tokens: int | None,
) -> None:
    """Talk to the tuned model, to its base, or to both side by side.

    Sampling and stop strings are those of generate.generation. Without a terminal, each line of the input is a
    question. /help shows the commands; Ctrl-D ends.
    """
    from lm_tuning.chat_command import chat_with_models

    chat_with_models(metadata.project_path, env, params, who=model, system=system, max_new_tokens=max_new_tokens)


@cli.command()
@env_option
@click.pass_obj
@explain_errors
def send_tracking(metadata: ProjectMetadata, env: str | None) -> None:
    """Send to MLflow what runs kept while it was away. What was sent before is not sent again.

    Exit code 2 says that something is still kept, and why.
    """
    from lm_tuning.hooks.mlflow_run import send_what_is_kept

    problems = send_what_is_kept(metadata.project_path, env, say=click.echo)
    if problems:
        raise UserError(problems)
