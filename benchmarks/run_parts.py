"""Where the time of a ``kedro run`` goes, told from the time stamps of its log lines.

:func:`write_logging_file` writes a logging configuration that keeps every line of the run, with its time, in a file
beside what the user sees. :func:`read_parts` reads that file: a line that is known closes the stretch of time since the
known line before it and names the part that it belongs to, so the parts add up to the whole.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import yaml

# In the order in which a run comes to them, which is that of the table.
PARTS = (
    "imports and hooks",
    "raw rows",
    "base model's digest",
    "split",
    "tokenize",
    "planning",
    "model load",
    "pre-training checks",
    "compile",
    "training",
    "held-out and checkpoints in training",
    "model saved",
    "held-out loss",
    "answers base",
    "answers tuned",
    "scores and reports",
    "exit",
)
_NODES = {
    "prepare_raw_examples": "raw rows",
    "prepare_base_model": "base model's digest",
    "check_examples": "split",
    "split_examples": "split",
    "tokenize_examples": "tokenize",
    # What their own lines do not name.
    "train_model": "scores and reports",
    "evaluate_models": "scores and reports",
}
# Steps, evaluations and checkpoints between lines that tell them apart from the rest.
_LOOP = "loop"
# Which stretch a line closes. The first that fits counts.
_LINES = tuple(
    (re.compile(pattern), part)
    for pattern, part in (
        (r"Running node: ", "imports and hooks"),
        (r"Micro-batches", "planning"),
        (r"Memory in GiB: ", "model load"),
        (r"(Before step 1: |First example)", "pre-training checks"),
        (r"step 0  held-out ", "held-out and checkpoints in training"),
        (r"Compiling ", _LOOP),
        (r"(Compiled [\d,]+ decoder layers? in |The decoder layers could not be compiled)", "compile"),
        (r"(Training: [\d,]+ steps? in |step \d+  held-out |Checkpoint of step )", _LOOP),
        (r"Evaluating on ", "model load"),
        (r"(Held-out loss of the \w+ model|Classes by the tuned model): [\d,]+ rows? in ", "held-out loss"),
        (r"Answers of the base model: [\d,]+ tokens? in ", "answers base"),
        (r"Answers of the tuned model: [\d,]+ tokens? in ", "answers tuned"),
    )
)
_SAID_SECONDS = re.compile(r": [\d,]+ \w+ in (?:([\d.]+) s|(\d+):(\d+) min)")
_COUNT = re.compile(r": ([\d,]+) tokens? in ")
_LINE = re.compile(r"^(\d+\.\d+)\t([\w.]+)\t(.*)$")


class Line(NamedTuple):
    """A line of the log: seconds since the epoch, logger, message without the lines that follow its first one."""

    at: float
    logger: str
    message: str


def write_logging_file(source: Path, target: Path, log: Path) -> None:
    """Write a copy of a project's logging configuration that keeps timed lines in a file too.

    Args:
        source: the project's ``logging.yml``.
        target: the copy, for ``KEDRO_LOGGING_CONFIG``.
        log: where the timed lines go.
    """
    config = yaml.safe_load(source.read_text(encoding="utf-8"))
    config["formatters"]["timed"] = {"format": "%(created).3f\t%(name)s\t%(message)s"}
    config["handlers"]["timed"] = {
        "class": "logging.FileHandler", "formatter": "timed", "filename": str(log), "encoding": "utf8",
    }  # fmt: skip
    config["root"]["handlers"].append("timed")
    # These say when nodes end and results are saved. The user is not shown them, and neither is the screen here.
    for name in ("kedro.runner.sequential_runner", "kedro.io.data_catalog"):
        config["loggers"][name] = {"level": "INFO", "handlers": ["timed"], "propagate": False}
    target.write_text(yaml.safe_dump(config), encoding="utf-8")


def read_lines(log: Path) -> list[Line]:
    """Read the timed lines, without those that continue a message.

    Args:
        log: the file; one that is not there has no lines.
    """
    if not log.exists():
        return []
    found = map(_LINE.match, log.read_text(encoding="utf-8", errors="replace").splitlines())
    return [Line(float(match[1]), match[2], match[3]) for match in found if match]


def read_parts(lines: list[Line], *, began: float, ended: float, step_seconds: float | None) -> dict[str, float]:
    """Divide the time of a run among its parts.

    Args:
        lines: of the log.
        began: when the process was started, in seconds since the epoch.
        ended: when it had ended.
        step_seconds: of all optimizer steps together, from ``efficiency_summary.csv``; ``None`` when there are none.

    Returns:
        Seconds of each part that took any; together they are the whole time.
    """
    seconds: dict[str, float] = defaultdict(float)
    last, node, is_saving = began, "", False
    for line in lines:
        part = _part_of(line, node, is_saving=is_saving)
        is_saving = is_saving or line.message.startswith("Saving data to ")
        if part is None:
            continue
        stretch = line.at - last
        if part == "held-out loss":
            # The model is loaded in the same stretch; the line says how long the measurement itself took.
            loading = max(stretch - (_said_seconds(line.message) or 0.0), 0.0)
            seconds["model load"] += loading
            stretch -= loading
        seconds[part] += stretch
        last = line.at
        if line.message.startswith("Running node: "):
            node, is_saving = line.message.removeprefix("Running node: ").partition(":")[0], False
    # Where the run was stopped, what it was doing then has no line that closes it.
    is_whole = any(re.match(r"Completed node: .*evaluate_models$", line.message) for line in lines)
    seconds["exit" if is_whole else "stopped in this part"] += ended - last
    loop = seconds.pop(_LOOP, 0.0)
    if loop:
        steps = min(step_seconds if step_seconds is not None else loop, loop)
        seconds["training"] += steps
        seconds["held-out and checkpoints in training"] += loop - steps
    order = {part: index for index, part in enumerate(PARTS)}
    return {name: value for name, value in sorted(seconds.items(), key=lambda item: order.get(item[0], 99)) if value}


def _part_of(line: Line, node: str, *, is_saving: bool) -> str | None:
    """Return which part a line closes, ``None`` if none."""
    if line.message.startswith("Completed node: "):
        return _NODES.get(node, "scores and reports")
    if line.message.startswith("Saving data to ") and not is_saving:
        return {"train_model": "model saved"}.get(node, _NODES.get(node))
    return next((part for pattern, part in _LINES if pattern.match(line.message)), None)


def _said_seconds(message: str) -> float | None:
    """Return how long a finished piece of work says that it took."""
    match = _SAID_SECONDS.search(message)
    if match is None:
        return None
    return float(match[1]) if match[1] else 60.0 * int(match[2]) + int(match[3])


def read_answer_speeds(lines: list[Line], parts: dict[str, float]) -> dict[str, float]:
    """Return tokens per second of the answers of each model, by all the time that they took.

    Args:
        lines: of the log.
        parts: as :func:`read_parts` returns them.
    """
    speeds = {}
    for name in ("base", "tuned"):
        said = next((line.message for line in lines if line.message.startswith(f"Answers of the {name} model: ")), "")
        count, seconds = _COUNT.search(said), parts.get(f"answers {name}")
        if count is not None and seconds:
            speeds[name] = int(count[1].replace(",", "")) / seconds
    return speeds
