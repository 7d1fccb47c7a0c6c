"""Settings of ``evaluate`` that are fine alone and wrong beside those of other groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lm_tuning.parameters.class_scores import find_class_score_problems
from lm_tuning.parameters.gate import CLASS_FIGURES, find_gate_problems, scores_of_language
from lm_tuning.parameters.generation import find_generation_problems

if TYPE_CHECKING:
    from lm_tuning.parameters.groups import Parameters


def find_evaluate_problems(parameters: Parameters) -> Iterator[tuple[tuple[str, ...], str]]:
    """Find what contradicts itself in the evaluation's settings.

    Args:
        parameters: of the run, valid one by one.

    Yields:
        The keys that take part, and the sentence for the user.
    """
    yield from find_generation_problems(parameters.evaluate.generation, "evaluate.generation")
    yield from _find_missing_split(parameters)
    yield from _find_needless_quantization(parameters)
    evaluate = parameters.evaluate
    yield from find_class_score_problems(evaluate.top_k, evaluate.abstain_below, task=parameters.task)
    yield from _find_wrong_bounds(parameters)


def _find_missing_split(parameters: Parameters) -> Iterator[tuple[tuple[str, ...], str]]:
    split, data, wanted = parameters.split, parameters.data, parameters.evaluate.split
    # Folds make validation one of them, whatever split.validation says.
    has_rows = {
        "auto": True,
        "validation": split.validation != 0 or data.validation_path is not None or split.num_folds is not None,
        "test": split.test != 0 or data.test_path is not None,
    }
    if not has_rows[wanted]:
        yield (
            ("evaluate.split", f"split.{wanted}", f"data.{wanted}_path"),
            f"evaluate.split = {wanted} needs {wanted} rows, but split.{wanted} = 0 and data.{wanted}_path is null.",
        )


def _find_needless_quantization(parameters: Parameters) -> Iterator[tuple[tuple[str, ...], str]]:
    key, held, train = "evaluate.quantization", parameters.evaluate.quantization, parameters.train
    if held == "none":
        return
    trained_over = "int8" if train.qlora.bits == 8 else train.qlora.quant_type
    if train.method == "qlora" and held == trained_over:
        yield (
            (key, "train.method", "train.qlora"),
            f"{key} = {held}, but train.method = qlora holds the weights so anyway, in training and in the "
            f"evaluation: set {key} = none.",
        )


def _find_wrong_bounds(parameters: Parameters) -> Iterator[tuple[tuple[str, ...], str]]:
    evaluate = parameters.evaluate
    if parameters.task == "sequence_classification":
        scores: dict[str, str | None] = dict.fromkeys(CLASS_FIGURES)
    else:
        asked = [*evaluate.scores.names, *evaluate.scores.own_metrics]
        scores = scores_of_language(asked, num_generate_rows=evaluate.num_generate_rows)
    for key, problem in find_gate_problems(evaluate.gate, scores):
        yield (key, "task", "evaluate.scores", "evaluate.num_generate_rows"), problem
