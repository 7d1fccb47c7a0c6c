"""Keep what each model scored on each row, and compare a model with the best earlier one on the same data.

One folder for each data digest and split, one file for each model: the rows of each score as arrays, so that a later
model is compared row by row, on the rows that both have.
"""

from __future__ import annotations

import contextlib
import json
import logging
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from lm_tuning.evaluation.statistics.outcomes import describe_difference, outcome_of, record_difference
from lm_tuning.evaluation.statistics.records import EarlierRunRecord, ScoreRecord
from lm_tuning.evaluation.statistics.scored_rows import MIN_ROWS, ScoredRows, compare, dense
from lm_tuning.storage.atomic import replacing_file
from lm_tuning.storage.digests import digest_values
from lm_tuning.text.store.table import Int64Array

logger = logging.getLogger(__name__)

MAX_MODELS = 20
"""Models that are kept for one data digest; the oldest goes first."""

MAX_DATA = 20
"""Data digests that are kept; the one that was used longest ago goes first."""

MAX_CELLS = 5_000_000
"""Scores with more numbers than this (counts of thousands of classes on many rows) are not kept: 40 MB a model."""

FORMAT = 1

# What zipfile, zlib and NumPy raise about a file that is cut off or has a wrong byte. A RuntimeError is about one that
# seems to be encrypted, or compressed in a way that zipfile does not know.
_DAMAGED = (OSError, EOFError, ValueError, KeyError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error)


class RunName(TypedDict):
    """What an earlier run is called by.

    Attributes:
        output: name of its result folders.
        date: when it was evaluated, ISO 8601 with zone.
        model_digest: names its weights.
        mlflow_run_id: the training in MLflow; None where it was not tracked.
    """

    output: str
    date: str
    model_digest: str
    mlflow_run_id: str | None


class _ScoreHeader(TypedDict):
    name: str
    signature: str
    higher_is_better: bool


@dataclass(frozen=True)
class EarlierRun:
    """What one earlier model scored by one score.

    Attributes:
        run: what it is called by.
        row_ids: ``(rows,)``.
        statistics: ``(rows, k)``.
    """

    run: RunName
    row_ids: Int64Array
    statistics: npt.NDArray[np.float64]


def history_folder(root: Path, *, tokens_key: str, split: str) -> Path:
    """Name the folder of one data digest and split.

    Args:
        root: of the store.
        tokens_key: names rows and tokenizer.
        split: that was evaluated.
    """
    return root / f"{digest_values([FORMAT, tokens_key, split])}-{split}"


def keep_run(folder: Path, run: RunName, tuned: Mapping[str, ScoredRows]) -> None:
    """Keep what a model scored; of a model that was kept before, the last evaluation stays.

    Args:
        folder: see :func:`history_folder`.
        run: what the model is called by.
        tuned: its scores by name.
    """
    kept = [rows for rows in tuned.values() if np.prod(rows.statistics.shape) <= MAX_CELLS]
    headers = [
        _ScoreHeader(name=rows.name, signature=rows.signature, higher_is_better=rows.higher_is_better) for rows in kept
    ]
    arrays: dict[str, Any] = {}
    for index, rows in enumerate(kept):
        arrays[f"{index}.row_ids"], arrays[f"{index}.statistics"] = rows.row_ids, dense(rows.statistics)
    header = json.dumps({"run": run, "scores": headers}, ensure_ascii=False)
    # Text as bytes: strings as objects would have to be unpickled, which reads as code.
    arrays["header"] = np.frombuffer(header.encode("utf-8"), dtype=np.uint8)
    with replacing_file(folder / f"{run['model_digest'][:16]}.npz") as aside:
        np.savez_compressed(aside, allow_pickle=False, **arrays)
    _forget_oldest(_stored(folder), MAX_MODELS)
    for data in _newest_first(folder.parent.glob("*/"))[MAX_DATA:]:
        _forget_oldest(_stored(data), 0)
        # A run of another output may be writing there just now, and then it stays.
        with contextlib.suppress(OSError):
            data.rmdir()


def compare_with_best(folder: Path, tuned: ScoredRows, *, model_digest: str, seed: int) -> EarlierRunRecord | None:
    """Compare a model with the best earlier one by the same score on the same data.

    Args:
        folder: see :func:`history_folder`.
        tuned: the score of the present model.
        model_digest: of the present model, which is not compared with itself.
        seed: of the draws.

    Returns:
        The best of those with enough rows in common, by its score on these rows; ``None`` where there is none.
    """
    found: list[tuple[float, EarlierRun, ScoredRows, ScoredRows]] = []
    for earlier in _read_all(folder, tuned):
        if earlier.run["model_digest"] == model_digest:
            continue
        pair = _common_rows(earlier, tuned)
        if pair is not None and np.isfinite(pair[0].value):
            found.append((pair[0].value if tuned.higher_is_better else -pair[0].value, earlier, *pair))
    if not found:
        return None
    _, earlier, before, after = max(found, key=lambda item: (item[0], item[1].run["date"]))
    difference = compare(before, after, seed)
    return {
        **earlier.run,
        "score": tuned.name,
        "num_rows": difference.num_rows,
        "earlier": before.value,
        "present": after.value if np.isfinite(after.value) else None,
        "difference": record_difference(difference),
        "outcome": outcome_of(difference, higher_is_better=tuned.higher_is_better),
        "num_earlier": len(found),
    }


def write_earlier(record: EarlierRunRecord, score: ScoreRecord) -> str:
    """Write in a line how the model compares with the best earlier one.

    Args:
        record: of that one.
        score: the score that they were compared by.
    """
    found = describe_difference(
        record["difference"],
        record["outcome"],
        title=score["title"],
        unit="" if score["higher_is_better"] else score["unit"],
        num_rows=record["num_rows"],
    )
    of = f"best of {record['num_earlier']} earlier models" if record["num_earlier"] > 1 else "earlier model"
    day = datetime.fromisoformat(record["date"]).strftime("%Y-%m-%d %H:%M")
    return f"Against the {of} on this data, output {record['output']} of {day}: {found}."


def _common_rows(earlier: EarlierRun, tuned: ScoredRows) -> tuple[ScoredRows, ScoredRows] | None:
    """Return both scores on the rows that both have, in one order; ``None`` where those are too few."""
    _, before, after = np.intersect1d(earlier.row_ids, tuned.row_ids, return_indices=True)
    if len(before) < MIN_ROWS or earlier.statistics.shape[1] != tuned.statistics.shape[1]:
        return None
    then = replace(tuned, statistics=earlier.statistics, row_ids=earlier.row_ids)
    return then.take(before), tuned.take(after)


def _read_all(folder: Path, wanted: ScoredRows) -> Iterator[EarlierRun]:
    """Read one score of every kept model that has it under the same signature."""
    for path in _stored(folder):
        try:
            with np.load(path, allow_pickle=False) as arrays:
                header = json.loads(bytes(arrays["header"]).decode("utf-8"))
                for index, score in enumerate(header["scores"]):
                    if (score["name"], score["signature"]) == (wanted.name, wanted.signature):
                        yield EarlierRun(header["run"], arrays[f"{index}.row_ids"], arrays[f"{index}.statistics"])
        except _DAMAGED as error:
            # A comparison less, and no reason to lose an evaluation.
            logger.warning("Scores of an earlier run cannot be read, so it is left out: %s (%s)", path, error)


def _stored(folder: Path) -> list[Path]:
    """List the files of earlier models; hidden ones are being written by another run."""
    return sorted(path for path in folder.glob("*.npz") if not path.name.startswith("."))


def _forget_oldest(paths: list[Path], keep: int) -> None:
    for path in _newest_first(paths)[keep:]:
        path.unlink(missing_ok=True)


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    times: dict[Path, int] = {}
    for path in paths:
        # Another run may have removed it since it was listed.
        with contextlib.suppress(FileNotFoundError):
            times[path] = path.stat().st_mtime_ns
    return sorted(times, key=lambda path: times[path], reverse=True)
