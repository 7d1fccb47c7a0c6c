"""Measure a tuned classifier once more with its weights in fewer bits, beside the same as it was trained."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from lm_tuning.batching.class_predictions import Predictions
from lm_tuning.batching.held_out_loss import HeldOut
from lm_tuning.evaluation.base import EvaluationJob, difference, finite, measure_loss
from lm_tuning.evaluation.class_records import QuantizedClasses
from lm_tuning.models.quantization import choose_quantization, weight_bytes
from lm_tuning.models.tuned import load_tuned
from lm_tuning.reporting.document import Paragraph, Section, Table
from lm_tuning.reporting.text import write_difference, write_number
from lm_tuning.text.store.table import Int64Array
from lm_tuning.wording import count_of, write_speed


@dataclass(frozen=True)
class MeasuredClassifier:
    """What one classifier makes of the rows, and what that takes.

    Attributes:
        held_out: loss and predictions.
        names: of its classes, by id.
        weights_bytes: memory of its weights, scales of quantized ones included.
        rows_per_second: of the whole measurement.
    """

    held_out: HeldOut
    names: list[str]
    weights_bytes: int
    rows_per_second: float

    @property
    def predictions(self) -> Predictions:
        """What it predicted for each row."""
        assert self.held_out.predictions is not None, "the task is a classification"
        return self.held_out.predictions


def measure_classifier(
    job: EvaluationJob, tokenizer: Any, rows: Int64Array, *, quantization: str = "none"
) -> MeasuredClassifier:
    """Run the tuned model over rows.

    Args:
        job: the evaluated split and how it is measured.
        tokenizer: the one that made the rows.
        rows: row indices, ``(rows,)``.
        quantization: bits of the weights; ``none`` for those that it was trained with. An adapter and the layer of the
            classes keep theirs.
    """
    settings = job.settings
    # An adapter stays beside the weights, as in training: predictions are of the model as it was trained.
    held = choose_quantization(quantization, compute_dtype=settings.compute_dtype)
    model = load_tuned(job.tuned_folder, quantization=held, **settings.loading)
    names = class_names(model)
    label = "Classes by the tuned model" + (f" in {quantization}" if quantization != "none" else "")
    began = time.perf_counter()
    # It ends with a copy to the host, so nothing runs on a device afterwards.
    held_out = measure_loss(job, model, tokenizer, rows, num_classes=len(names), label=label)
    speed = len(rows) / max(time.perf_counter() - began, 1e-9)
    return MeasuredClassifier(held_out, names, weight_bytes(model), speed)


def class_names(model: Any) -> list[str]:
    """Return the names of a classifier's classes, in the order of their ids.

    Args:
        model: with ``id2label`` in its config.
    """
    return [str(model.config.id2label[index]) for index in range(int(model.config.num_labels))]


def compare_quantized_classes(
    job: EvaluationJob, trained: MeasuredClassifier, quantized: MeasuredClassifier
) -> QuantizedClasses:
    """Compare a classifier in fewer bits with itself as it was trained.

    Args:
        job: names the bits.
        trained: as it was trained.
        quantized: in fewer bits.
    """
    name = job.settings.evaluate.quantization
    assert name != "none", "somebody asked for it"
    before, after = (_figures(one) for one in (trained, quantized))
    return QuantizedClasses(
        quantization=name,
        accuracy=after["accuracy"],
        macro_f1=after["macro_f1"],
        nats_per_row=after["nats_per_row"],
        accuracy_difference=difference(before["accuracy"], after["accuracy"]),
        macro_f1_difference=difference(before["macro_f1"], after["macro_f1"]),
        nats_per_row_difference=difference(before["nats_per_row"], after["nats_per_row"]),
        num_changed_rows=int(np.sum(trained.predictions.classes != quantized.predictions.classes)),
        weights_bytes=quantized.weights_bytes,
        unquantized_weights_bytes=trained.weights_bytes,
        rows_per_second=quantized.rows_per_second,
        unquantized_rows_per_second=trained.rows_per_second,
    )


def quantized_classes_section(found: QuantizedClasses) -> Section:
    """Lay out the table of both measurements.

    Args:
        found: see :func:`compare_quantized_classes`.
    """
    name = found["quantization"]

    def line(title: str, after: float | None, change: float | None) -> tuple[str, str, str, str]:
        before = None if after is None or change is None else after - change
        return title, write_number(before, 4), write_number(after, 4), write_difference(change)

    sizes = found["unquantized_weights_bytes"], found["weights_bytes"]
    speeds = found["unquantized_rows_per_second"], found["rows_per_second"]
    rows = [
        line("Accuracy (0 to 1)", found["accuracy"], found["accuracy_difference"]),
        line("Macro-F1 (0 to 1)", found["macro_f1"], found["macro_f1_difference"]),
        line("Held-out loss (nats per row)", found["nats_per_row"], found["nats_per_row_difference"]),
        ("Weights (MiB)", *(f"{size / 2**20:,.1f}" for size in sizes), f"x {sizes[1] / sizes[0]:.2f}"),
        ("Rows per second", *map(write_speed, speeds), f"x {speeds[1] / speeds[0]:.2f}"),
    ]
    changed = found["num_changed_rows"]
    said = (
        f"The tuned model on the same rows with its weights in {name}, by bitsandbytes; an adapter and the layer of "
        f"the classes are not quantized. {count_of(changed, 'row')} {'gets' if changed == 1 else 'get'} another class."
    )
    return Section("quantized", f"In {name}", [Paragraph(said), Table("", ("", "As trained", name, "Change"), rows)])


def _figures(measured: MeasuredClassifier) -> dict[str, float | None]:
    return {name: finite(value) for name, value in measured.held_out.figures.items()}
