"""Name the class of every row in a file: each goes to disk as it comes, and work that was stopped goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

import numpy as np

from lm_tuning.batching.class_predictions import Float32Array
from lm_tuning.classifying.records import PredictedRow, PredictionsRecord
from lm_tuning.classifying.row_texts import RowTexts
from lm_tuning.classifying.rows import CheckedRows, TextTokenizer, write_rows
from lm_tuning.classifying.scoring import score_rows
from lm_tuning.classifying.tally import Tally
from lm_tuning.data.records import SourceFile
from lm_tuning.data.sources.describe import describe_named
from lm_tuning.errors import UserError
from lm_tuning.evaluation.calibration import is_answered
from lm_tuning.evaluation.class_quantized import class_names
from lm_tuning.evaluation.settings import EvaluationSettings, choose_settings
from lm_tuning.json_types import JsonObject
from lm_tuning.models.loading import load_tokenizer, read_config
from lm_tuning.models.record import TuningRecord, location_of
from lm_tuning.models.tuned import load_tuned, read_label_map, read_tuning
from lm_tuning.parameters.data import DataParameters, TokenizeParameters
from lm_tuning.parameters.evaluate import EvaluateParameters
from lm_tuning.parameters.groups import EnvironmentParameters, ModelParameters
from lm_tuning.parameters.predict import PredictParameters
from lm_tuning.progress import OnProgress, ignore_progress
from lm_tuning.storage.digests import digest_files, digest_values
from lm_tuning.storage.row_stream import RowStream
from lm_tuning.text.store.table import Int64Array
from lm_tuning.wording import count_of, write_speed

logger = logging.getLogger(__name__)

STREAM_NAME = "predictions"
PREDICTIONS_VERSION = 1
"""Raise it when rows are read or scored in another way: lines of an earlier version are not gone on with."""

_LABEL = "Predicting classes"
# What a probability is rounded to: a millionth is below what float32 arithmetic is good for here.
_DIGITS = 6


@dataclass(frozen=True)
class PredictSettings:
    """What decides the predictions beside the model.

    Attributes:
        predict: the ``predict`` parameters.
        data: the ``data`` parameters.
        tokenize: the ``tokenize`` parameters.
        evaluation: device and dtypes.
        abstain_below: probability below which a row gets no class; ``None`` for no such limit.
        digest_cache: see ``digest_files``.
    """

    predict: PredictParameters
    data: DataParameters
    tokenize: TokenizeParameters
    evaluation: EvaluationSettings
    abstain_below: float | None
    digest_cache: Path | None = None

    @classmethod
    def choose(
        cls,
        tuned_folder: Path,
        predict: PredictParameters,
        data: DataParameters,
        tokenize: TokenizeParameters,
        *,
        evaluate: EvaluateParameters,
        model: ModelParameters,
        environment: EnvironmentParameters,
        seed: int,
        cache: Path | None = None,
    ) -> Self:
        """Choose device and dtypes as for an evaluation, and put the parameters beside them.

        Args:
            tuned_folder: adapter or full weights with their ``tuning.json``.
            predict: the ``predict`` parameters.
            data: the ``data`` parameters.
            tokenize: the ``tokenize`` parameters.
            evaluate: the ``evaluate`` parameters, whose threshold counts where ``predict`` has none.
            model: the ``model`` parameters.
            environment: the ``environment`` parameters.
            seed: the ``seed`` parameter.
            cache: see ``digest_files``.

        Raises:
            UserError: the tuned model cannot be read, or the device does not have the dtype of ``model.dtype``.
        """
        batches = evaluate.model_copy(update={"micro_batch_tokens": predict.micro_batch_tokens})
        settings = choose_settings(tuned_folder, batches, model, environment, seed=seed)
        threshold = evaluate.abstain_below if predict.abstain_below is None else predict.abstain_below
        return cls(predict, data, tokenize, settings, threshold, cache)


def predict_rows(
    tuned_folder: Path, work: Path, settings: PredictSettings, *, on_progress: OnProgress = ignore_progress
) -> tuple[Path, PredictionsRecord]:
    """Name the class of every row; rows that a run with the same model, files and settings has done stay as they are.

    Args:
        tuned_folder: adapter or full weights with their ``tuning.json``.
        work: a folder of its own, where lines are until all are there.
        settings: everything else.
        on_progress: told rows read, and rows predicted.

    Returns:
        The finished file, one JSON object a line in the order of the rows, to be moved to where it belongs; and the
        figures.

    Raises:
        UserError: everything that is wrong with model, files, columns or rows, before any weights are loaded.
    """
    tuning = find_classifier(tuned_folder)
    files = _find_files(settings)
    tokenizer = load_tokenizer(str(tuned_folder.absolute()))
    names = _names_of(tuned_folder)
    texts = TextTokenizer(tokenizer, settings.tokenize, names)
    key = digest_values(_describe_work(tuned_folder, tuning, settings, files))
    rows = write_rows(work, files, settings.data, settings.predict, texts, on_progress=on_progress)
    with RowStream(work, STREAM_NAME, key=key, row_field="row_id") as stream:
        _tell_of_earlier(stream, len(rows.table))
        run = _PredictionRun(settings, rows, stream, on_progress)
        run.predict_all(tuned_folder, int(tokenizer.pad_token_id), [*names])
        record = run.describe(tuned_folder)
        finished = stream.finish()
    rows.remove()
    return finished, record


def find_classifier(tuned_folder: Path) -> TuningRecord:
    """Read how a tuned model was made, and refuse one that names no classes.

    Args:
        tuned_folder: adapter or full weights with their ``tuning.json``.

    Raises:
        UserError: the folder is no tuned model, or a language model; or the config of its base cannot be read.
    """
    tuning = read_tuning(tuned_folder)
    if tuning["task"] != "sequence_classification":
        raise UserError(
            f"{tuned_folder} is a language model (task: {tuning['task']}), which writes text and names no classes. For "
            "its answers to the rows of a file: kedro run --pipelines=generate"
        )
    # Before anything is read: a base that cannot be reached would end the run after all rows were checked.
    if tuning["method"] == "full":
        read_config(str(tuned_folder.absolute()))
    else:
        read_config(**location_of(tuning["base"]))
    return tuning


def describe_predictions(record: PredictionsRecord) -> str:
    """Describe in a few lines what was predicted, for the log.

    Args:
        record: see :func:`predict_rows`.
    """
    before = f", {record['num_resumed']:,} of them in earlier runs" if record["num_resumed"] else ""
    speed = record["rows_per_second"]
    at = f", {write_speed(speed)} rows per second in this run" if speed else ""
    parts = [f"{count_of(record['num_rows'], 'row')} predicted{before}{at}."]
    if record["abstain_below"]:
        parts.append(
            f"No answer below a probability of {record['abstain_below']}: {count_of(record['num_abstained'], 'row')}."
        )
    if record["num_skipped"]:
        parts.append(f"{count_of(record['num_skipped'], 'bad row')} skipped.")
    if "labelled" in record:
        labelled = record["labelled"]
        parts.append(
            f"Accuracy on {count_of(labelled['num_labelled'], 'labelled row')}: {labelled['accuracy']:.4f}, macro-F1 "
            f"{labelled['macro_f1']:.4f}."
        )
        if labelled["num_unknown_labels"]:
            parts.append(f"{labelled['num_unknown_labels']:,} labels are no class of the model and count as wrong.")
    largest = ", ".join(f"{line['class']} ({line['num_rows']:,})" for line in record["per_class"][:3])
    return " ".join([*parts, f"Most frequent: {largest}." if largest else ""]).strip()


def _find_files(settings: PredictSettings) -> list[SourceFile]:
    if settings.predict.path is None:
        raise UserError(
            "predict.path = null: name the file of rows to predict, such as predict.path: data/01_raw/new_rows.csv."
        )
    return describe_named(settings.predict.path, "predict.path", split="test", digest_cache=settings.digest_cache)[0]


def _names_of(tuned_folder: Path) -> dict[str, int]:
    label_map = read_label_map(tuned_folder)
    if not label_map:
        raise UserError(f"{tuned_folder} has no label_map.json, which names its classes: train it again.")
    return label_map


def _describe_work(
    folder: Path, tuning: TuningRecord, settings: PredictSettings, files: list[SourceFile]
) -> Mapping[str, object]:
    """Return all that the lines depend on; work is gone on with where it is the same."""
    stored = sorted(path for path in folder.rglob("*") if path.is_file())
    data, evaluation = settings.data, settings.evaluation
    return {
        "version": PREDICTIONS_VERSION,
        "rows": [[file["path"], file["digest"]] for file in files],
        "model": digest_files(stored, settings.digest_cache),
        "base": [tuning["base"]["digest"], tuning["base"]["tokenizer_digest"]],
        "predict": settings.predict.model_dump(mode="json", exclude={"path", "micro_batch_tokens"}),
        "abstain_below": settings.abstain_below,
        "data": data.model_dump(
            mode="json", include={"columns", "template", "normalize", "delimiter", "field", "explode", "max_row_bytes"}
        ),
        "tokenize": settings.tokenize.model_dump(mode="json"),
        "precision": [evaluation.device, evaluation.weights_dtype, evaluation.compute_dtype, evaluation.tf32],
    }


def _tell_of_earlier(stream: RowStream, num_rows: int) -> None:
    """Log what an earlier run has left: lines to go on from, or lines that do not belong here."""
    if stream.num_resumed:
        logger.info("Going on: %d of %s predicted already.", stream.num_resumed, count_of(num_rows, "row"))
    elif stream.others:
        logger.warning(
            "Unfinished predictions of another model, other rows or other settings are in %s. They are not gone on "
            "with; all rows are predicted, and the file is removed when that is done.",
            ", ".join(map(str, stream.others)),
        )


class _PredictionRun:
    """Predicts the rows that are not done yet."""

    def __init__(
        self, settings: PredictSettings, rows: CheckedRows, stream: RowStream, on_progress: OnProgress
    ) -> None:
        self._settings, self._rows, self._stream, self._on_progress = settings, rows, stream, on_progress
        self._seconds = 0.0
        self._num_tokens = 0
        self._tally = Tally([])
        self._texts = RowTexts(rows.rows_path)

    def predict_all(self, tuned_folder: Path, pad_id: int, names: list[str]) -> None:
        """Load the model and run it, unless every row is done."""
        table, stream = self._rows.table, self._stream
        left = np.flatnonzero([row_id not in stream.done for row_id in table.row_ids.tolist()])
        self._tally = Tally(names)
        for done in stream.rows() if stream.num_resumed else ():
            self._tally.add(cast(PredictedRow, done))
        if not len(left):
            return
        # An adapter stays beside the weights: adding it to them would round, and this is the model that was evaluated.
        model = load_tuned(tuned_folder, **self._settings.evaluation.loading)
        assert class_names(model) == names, "the label map and the model's config name the same classes"
        self._on_progress(_LABEL, len(stream), len(table), "rows")
        chunks = score_rows(model, table, left, self._settings.evaluation, pad_id=pad_id, num_classes=len(names))
        began = time.monotonic()
        try:
            for indices, probabilities in chunks:
                self._append(indices, probabilities, names)
                self._on_progress(_LABEL, len(stream), len(table), "rows")
        finally:
            self._seconds = time.monotonic() - began
            if len(stream) < len(table):  # stopped, or out of memory
                logger.warning(
                    "%d of %d rows are predicted and kept in %s: the same command goes on from there.",
                    len(stream),
                    len(table),
                    stream.path,
                )
        self._num_tokens = int(table.lengths[left].sum())

    def describe(self, tuned_folder: Path) -> PredictionsRecord:
        """Return the figures of all rows, those of earlier runs included."""
        tally, files = self._tally, self._rows.files
        num_made = tally.num_rows - self._stream.num_resumed
        record: PredictionsRecord = {
            "tuned_folder": str(tuned_folder),
            "reading": self._rows.reading,
            "num_rows": tally.num_rows,
            "num_skipped": sum(sum(file["rows_skipped"].values()) for file in files),
            "num_shortened": self._rows.num_shortened,
            "num_resumed": self._stream.num_resumed,
            "num_abstained": tally.num_abstained,
            "answered_fraction": 1 - tally.num_abstained / max(tally.num_rows, 1),
            "mean_probability": tally.mean_probability,
            "rows_per_second": num_made / self._seconds if self._seconds else None,
            "tokens_per_second": self._num_tokens / self._seconds if self._seconds else None,
            "abstain_below": "" if self._settings.abstain_below is None else f"{self._settings.abstain_below:g}",
            "per_class": tally.per_class(),
        }
        if labelled := tally.labelled():
            record["labelled"] = labelled
        return record

    def _append(self, indices: Int64Array, probabilities: Float32Array, names: list[str]) -> None:
        """Write the lines of some rows."""
        if not np.isfinite(probabilities).all():
            raise UserError(
                f"The tuned model gives {self._name_row(indices, probabilities)} no number as its probability: its "
                "weights may be damaged. Train again or copy it again."
            )
        lines = list(self._lines(indices, probabilities, names))
        self._stream.append([cast(JsonObject, line) for line in lines])
        for line in lines:
            self._tally.add(line)

    def _lines(self, indices: Int64Array, probabilities: Float32Array, names: list[str]) -> Iterator[PredictedRow]:
        chosen = probabilities.argmax(axis=1)  # (chunk,)
        best = probabilities.max(axis=1)
        threshold = self._settings.abstain_below
        answered = np.ones(len(best), bool) if threshold is None else is_answered(best, threshold)
        texts = self._texts.take(indices)
        files = self._rows.files
        for position, row in enumerate(texts):
            name = names[chosen[position]]
            line: PredictedRow = {"row_id": row["row_id"], "text": row["text"], "class": name, "probability": 0.0}
            if len(files) > 1:
                line["file"], line["row"] = files[row["file"]]["path"], row["row"]
            line["probability"] = round(float(best[position]), _DIGITS)
            if not answered[position]:
                line["class"], line["likeliest"] = None, name
            if row["label"] is not None:
                line["label"] = row["label"]
            if self._settings.predict.all_scores:
                scores = probabilities[position].tolist()
                line["scores"] = {each: round(score, _DIGITS) for each, score in zip(names, scores, strict=True)}
            yield line

    def _name_row(self, indices: Int64Array, probabilities: Float32Array) -> str:
        first = int(np.flatnonzero(~np.isfinite(probabilities).all(axis=1))[0])
        [row] = self._texts.take(indices[first : first + 1])
        return f"row {row['row']} of {self._rows.files[row['file']]['path']}"
