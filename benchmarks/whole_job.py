"""Time whole jobs from the return key to the end of the process, by part, beside plain scripts that do the same.

    python benchmarks/whole_job.py [--jobs default banking77 gsm8k] [--data FOLDER] [--model FOLDER] [--tiny]

Each job runs through ``kedro run`` in a fresh copy of the project: *first*, with no plan, compiled code, tokens or
evaluation of the base model kept, and *again*, with all of them. The model is converted before. Beside it runs a plain
script (``benchmarks/plain/``) with the Trainer of transformers: the same rows, adapter, learning rate, steps and
tokens, in the largest batch that fits, answers by batched ``generate`` with the adapter merged, and the same held-out
rows.

* ``default``: the default example and settings.
* ``banking77``: one epoch of that recipe, measured on the set's test rows.
* ``gsm8k``: 300 steps of 16,384 tokens of that recipe, 256 answers of at most 200 tokens by both models.

Every run prints one JSON line when it ends; a run that passes ``--timeout`` is stopped, and its parts until then are
printed. Losses of both sides stand below the table: a speed at another loss says nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT / "src")]

from jobs import JOBS, Job, copy_rows, read_parameters, save_tiny_model, settings_of  # noqa: E402
from plain_run import run_plain, write_settings  # noqa: E402
from project_run import copy_project, environment_of, forget_compiled_code, run_project  # noqa: E402
from run_parts import PARTS  # noqa: E402

SIDES = ("product", "plain", "both")
COLUMNS = ("first", "again", "plain")
PLAIN_PARTS = ("start and exit", "imports", "read and tokenize", "set-up", "scores", "stopped in this part")
say = sys.stdout.write


def read_options() -> argparse.Namespace:
    """Read what is to be run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = os.environ.get("LM_TUNING_TEST_DATA")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--side", choices=SIDES, default="both")
    parser.add_argument("--rounds", type=int, default=1, help="how often each job is timed, each time in a fresh copy")
    parser.add_argument(
        "--data", type=Path, default=data and Path(data),
        help="folder with gsm8k and banking77 ($LM_TUNING_TEST_DATA)",
    )  # fmt: skip
    parser.add_argument("--model", type=Path, help="folder of the base model; without it the default one is converted")
    parser.add_argument("--liger", action="store_true", help="the plain side trains with Liger's kernels, on a GPU")
    parser.add_argument("--params", default="", help="further settings of all jobs, as kedro run takes them")
    parser.add_argument("--scratch", type=Path, help="folder for copies and logs, kept; a temporary one by default")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds after which a run is stopped")
    parser.add_argument("--no-warm-up", action="store_true", help="do not import the packages once before")
    parser.add_argument("--tiny", action="store_true", help="a random model and few rows: does everything run?")
    parser.add_argument("--out", type=Path, help="file that the JSON lines are added to")
    return parser.parse_args()


def main() -> None:
    """Run the jobs and print a table of each."""
    options = read_options()
    if options.liger and importlib.util.find_spec("liger_kernel") is None:
        say("Liger's kernels are left out, liger_kernel is not installed\n")
        options.liger = False
    with tempfile.TemporaryDirectory() as temporary:
        scratch = (options.scratch or Path(temporary)).resolve()
        scratch.mkdir(parents=True, exist_ok=True)
        model = find_model(options, scratch)
        if not options.no_warm_up:
            warm_up()
        for name in options.jobs:
            job = JOBS[name]
            if job.files and options.data is None and not options.tiny:
                say(f"{name}: left out, --data names no folder with {' and '.join(job.files)}\n")
                continue
            runs = []
            for number in range(1, options.rounds + 1):
                for run in time_job(name, job, options, model=model, folder=scratch / name):
                    runs.append(run | {"round": number, "is_tiny": options.tiny})
                    line = json.dumps(runs[-1])
                    say(line + "\n")
                    sys.stdout.flush()
                    if options.out:
                        with options.out.open("a", encoding="utf-8") as file:
                            file.write(line + "\n")
            say(write_table(name, runs))
            sys.stdout.flush()


def find_model(options: argparse.Namespace, scratch: Path) -> Path:
    """Return the folder of the base model, converted here where none is named."""
    folder: Path = options.model or scratch / "model"
    if options.model is None and not (folder / "config.json").exists():
        if options.tiny:
            save_tiny_model(folder)
        else:
            from lm_tuning.models.base_model import convert_embedded_model

            convert_embedded_model(folder)
    return folder.resolve()


def warm_up() -> None:
    """Import the packages once: a fresh machine reads them from its disk for the first time, which can take minutes."""
    packages = "torch, transformers, peft, mlflow, kedro, datasets, transformers.models.llama.modeling_llama"
    subprocess.run([sys.executable, "-c", f"import {packages}"], capture_output=True, check=False)


def time_job(
    name: str, job: Job, options: argparse.Namespace, *, model: Path, folder: Path
) -> Iterator[dict[str, Any]]:
    """Run a job first, again and by the plain script, as far as wanted, and yield each run as soon as it ends."""
    project = folder / "project"
    settings = settings_of(job, model=model, is_tiny=options.tiny, more=options.params)
    copy_project(project)
    forget_compiled_code(project)
    copy_rows(job, project, None if options.tiny else options.data)
    shutil.rmtree(folder / "plain", ignore_errors=True)
    versions = describe_machine(environment_of(project))
    known = {"env": job.env, "settings": settings, "timeout": options.timeout}
    is_whole = False
    if options.side != "plain":
        for which in ("first", "again"):
            found = run_project(project, pipelines=None, name=which, **known)
            yield {"job": name, "side": "product", "run": which, **found, **versions}
            is_whole = found["is_whole"]
            if not is_whole:
                break  # there is nothing whole to do again
    if options.side != "product":
        if not is_whole:
            # Its rows are those of the product's split; making them is not part of either time.
            run_project(project, pipelines="split,tokenize", name="rows", **known)
        parameters = read_parameters(project, job.env, settings)
        file = write_settings(project, parameters, folder / "plain", use_liger=options.liger)
        found = run_plain(project, file, task=parameters.task, timeout=options.timeout)
        yield {"job": name, "side": "plain", "run": "plain", "has_liger": options.liger, **found, **versions}


def describe_machine(environment: dict[str, str]) -> dict[str, str]:
    """Return the card and the versions, read in a process of their own."""
    code = (
        "import json, torch, transformers\n"
        "card = torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'\n"
        "print(json.dumps({'card': card, 'torch': torch.__version__, 'transformers': transformers.__version__}))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    versions: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return versions


def write_table(name: str, runs: list[dict[str, Any]]) -> str:
    """Return the parts of each run in seconds, the median of its rounds, and beside them what came out."""
    found = {column: [run for run in runs if run["run"] == column] for column in COLUMNS}
    shown = [column for column in COLUMNS if found[column]]
    order = [*PARTS[:-1], *PLAIN_PARTS, PARTS[-1]]
    parts = [part for part in order if any(part in run["parts"] for run in runs)]
    lines = [f"\n{name}, {runs[0]['card']}, torch {runs[0]['torch']}; seconds", "| part | " + " | ".join(shown) + " |"]
    lines.append("|---|" + "---:|" * len(shown))

    def row(title: str, pick: Any, style: str) -> None:
        cells = []
        for column in shown:
            values = [value for run in found[column] if (value := pick(run)) is not None]
            cells.append(format(sorted(values)[len(values) // 2], style) if values else "")
        if any(cells):
            lines.append(f"| {title} | {' | '.join(cells)} |")

    for part in parts:
        row(part, lambda run, part=part: run["parts"].get(part), ".1f")
    row("**all**", lambda run: run["wall_seconds"], ".1f")
    row("training, tokens/s", lambda run: run.get("tokens_per_second"), ",.0f")
    for model in ("base", "tuned"):
        row(f"answers {model}, tokens/s", lambda run, m=model: run.get("answer_tokens_per_second", {}).get(m), ",.0f")
    row("tokens of all steps", lambda run: run.get("num_tokens"), ",")
    row("loss of step 1", lambda run: run.get("first_loss"), ".4f")
    row("loss of the last 10 steps", lambda run: run.get("last_loss"), ".4f")
    for model in ("base", "tuned"):
        for score in ("nats_per_token", "nats_per_row", "rouge_l", "accuracy", "macro_f1"):
            row(f"{model}, {score}", lambda run, m=model, s=score: run.get("scores", {}).get(m, {}).get(s), ".4f")
    row("memory of training, GiB", lambda run: run.get("peak_memory_gib"), ".1f")
    row("rows of a batch", lambda run: run.get("device_rows"), ",")
    stopped = [run["run"] for run in runs if not run["is_whole"]]
    if stopped:
        lines.append(f"stopped before the end: {', '.join(stopped)}")
    return "\n".join(lines) + "\n\n"


if __name__ == "__main__":
    main()
