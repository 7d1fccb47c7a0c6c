"""The plain side of a whole job: the same rows and settings for the scripts in ``plain/``, and their run."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from project_run import environment_of, run_to_end

SCRIPTS = {"causal_lm": "language.py", "sequence_classification": "classes.py"}


def write_settings(project: Path, parameters: Any, folder: Path, *, use_liger: bool = False) -> Path:
    """Write the rows of a project's splits and the settings of its job for a plain script.

    The rows are those that the product has split, and the evaluated ones those that it evaluates.

    Args:
        project: where splits and tokens are stored.
        parameters: of the job, as ``lm_tuning.parameters.groups.Parameters``.
        folder: where to; it is made.
        use_liger: whether the script trains with Liger's kernels on a GPU.

    Returns:
        The settings' file.
    """
    from lm_tuning.batching.held_out_loss import choose_rows
    from lm_tuning.text.store.table import open_split

    folder.mkdir(parents=True, exist_ok=True)
    stores = [project / "data" / name for name in (f"02_intermediate/{parameters.output}/splits",
                                                   f"05_model_input/{parameters.output}/tokens")]  # fmt: skip
    splits, tokens = (store / json.loads((store / "current.json").read_text())["key"] for store in stores)
    evaluate, train, seed = parameters.evaluate, parameters.train, parameters.seed
    held_out = "test" if len(open_split(tokens, "test")) else "validation"
    wanted = {
        "train": ("train", None),
        "validation": ("validation", train.eval_max_rows),
        "loss": (held_out, evaluate.max_loss_rows),
        "answers": (held_out, evaluate.num_generate_rows),
    }
    if parameters.task == "sequence_classification":
        del wanted["answers"]
    paths = {}
    for name, (split, count) in wanted.items():
        table = open_split(tokens, split)
        row_ids = {table[int(index)].row_id for index in choose_rows(len(table), count, seed)}
        rows = [row for row in _read_split(splits / f"{split}.arrow") if row["row_id"] in row_ids]
        paths[name] = folder / f"{name}.jsonl"
        paths[name].write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    lengths = open_split(tokens, "train").lengths
    rows_per_step = train.effective_batch_rows or max(round(train.effective_batch_tokens / float(lengths.mean())), 1)
    settings = {
        "model": parameters.model.name_or_path,
        "rows": {name: str(path) for name, path in paths.items()},
        "output_dir": str(folder / "checkpoints"),
        "rows_per_step": rows_per_step,
        "device_rows": None,
        "use_liger": use_liger,
        "max_steps": train.max_steps,
        "num_train_epochs": train.num_epochs,
        # A few steps of a tiny run are all logged.
        "logging_steps": 1 if train.max_steps is not None and train.max_steps < 20 else 10,
        "learning_rate": train.learning_rate,
        "lr_scheduler_type": train.trainer.get("lr_scheduler_type", "linear"),
        "warmup_steps": train.trainer.get("warmup_steps", 0),
        "seed": seed,
        "lora_r": train.lora.r,
        "lora_alpha": train.lora.alpha,
        "lora_dropout": train.lora.dropout,
        "max_length": parameters.tokenize.max_length_tokens,
        "max_new_tokens": evaluate.generation.max_new_tokens,
        "eval_every_steps": train.eval_every_steps,
        "save_every_steps": train.save_every_steps,
        "load_best": train.load_best,
        "best_metric": train.best_metric,
    }
    path = folder / "settings.json"
    path.write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return path


def _read_split(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a split, with the columns that a plain script wants."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        table = pa.ipc.open_file(source).read_all()
    names = [name for name in ("row_id", "prompt", "response", "system", "text", "label") if name in table.column_names]
    rows: list[dict[str, Any]] = table.select(names).to_pylist()
    return rows


def run_plain(project: Path, settings: Path, *, task: str, timeout: float) -> dict[str, Any]:
    """Run a plain script, with the largest batch that fits, which is found before and not counted.

    Args:
        project: the copy beside which it runs; its variables are the same.
        settings: as :func:`write_settings` wrote them.
        task: of the job.
        timeout: seconds after which it is stopped; the parts until then are returned.

    Raises:
        SystemExit: the script failed, with the end of what it said.
    """
    script = Path(__file__).parent / "plain" / SCRIPTS[task]
    given = json.loads(settings.read_text(encoding="utf-8"))
    if given["device_rows"] is None:
        found = _run_script(project, [str(script), str(settings), "--find-batch"], timeout=timeout)
        given["device_rows"] = found.get("device_rows") or given["rows_per_step"]
        settings.write_text(json.dumps(given, indent=2), encoding="utf-8")
    return _run_script(project, [str(script), str(settings)], timeout=timeout)


def _run_script(project: Path, arguments: list[str], *, timeout: float) -> dict[str, Any]:
    """Run a script and return its parts and its result."""
    began = time.time()
    shown, said = project.parent / "plain.log", project.parent / "plain.err"
    with shown.open("w", encoding="utf-8") as out, said.open("w", encoding="utf-8") as errors:
        code = run_to_end(
            [sys.executable, *arguments], timeout, cwd=project, env=environment_of(project), stdout=out, stderr=errors
        )
    wall = time.time() - began
    if code:
        raise SystemExit(f"{Path(arguments[0]).name} ended with {code}:\n{said.read_text(errors='replace')[-4000:]}")
    lines = shown.read_text(encoding="utf-8").splitlines()
    parts: dict[str, float] = {}
    for line in lines:
        if line.startswith("PART "):
            for name, seconds in json.loads(line[5:]).items():
                parts[name] = parts.get(name, 0.0) + seconds
    # What no part holds: the interpreter's start and its end.
    parts["start and exit" if code == 0 else "stopped in this part"] = wall - sum(parts.values())
    result = next((json.loads(line[7:]) for line in lines if line.startswith("RESULT ")), {})
    return {"wall_seconds": wall, "is_whole": code == 0, "parts": parts, **result}
