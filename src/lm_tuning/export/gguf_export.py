"""Write a merged model as a GGUF and let llama.cpp show that it reads what was meant."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from lm_tuning.errors import UserError
from lm_tuning.export import gguf_check
from lm_tuning.export.gguf_check import GgufJob, GgufResult
from lm_tuning.export.gguf_vocabulary import GgufVocabulary, find_tokenizer_problems, read_vocabulary
from lm_tuning.export.gguf_writing import find_architecture_problems, write_gguf
from lm_tuning.export.parity import HeldOutRows, Reference, describe_distance, judge, run_script
from lm_tuning.export.plain_check import ComparedRow, LogitsReader, Sums
from lm_tuning.export.records import BoundRecord, DistanceRecord, GgufRecord, ParityRecord
from lm_tuning.models.generation_settings import GENERATION_NAME
from lm_tuning.models.loading import load_tokenizer
from lm_tuning.parameters.export import ExportParameters, GgufParameters
from lm_tuning.progress import OnProgress

logger = logging.getLogger(__name__)

GGUF_NAME = "model.gguf"
READER = "llama_cpp"
INSTALL_COMMAND = 'pip install -e ".[gguf-check]"'
_NUM_DRAWS = 2000
_NUM_SHOWN_TOKENS = 12


def find_gguf_problems(tuned_folder: Path, task: str, config: Any, settings: GgufParameters) -> list[str]:
    """Return before any work why a GGUF of a model would be wrong, or could not be shown to be right.

    Args:
        tuned_folder: has the tokenizer.
        task: of the training.
        config: of the model.
        settings: the ``export.gguf`` parameters.
    """
    how_to_fix = "Set export.format = merged."
    if task != "causal_lm":
        return [
            f"export.format = gguf is for language models, and {tuned_folder} was trained for task = {task}. "
            f"{how_to_fix}"
        ]
    tokenizer = load_tokenizer(str(tuned_folder.absolute()))
    wrong = [
        *(f"the model {reason}" for reason in find_architecture_problems(config, settings.quantization)),
        *(f"the tokenizer {reason}" for reason in find_tokenizer_problems(tokenizer)),
    ]
    problems = [f"export.format = gguf is not possible for {tuned_folder}: {reason}. {how_to_fix}" for reason in wrong]
    if not is_checkable() and not settings.publish_unchecked:
        problems.append(
            "export.format = gguf is compared by llama.cpp itself, and llama-cpp-python is not installed. Install it "
            f"with `{INSTALL_COMMAND}` (it compiles llama.cpp), or set export.gguf.publish_unchecked = true, which "
            "publishes a file that nothing has read."
        )
    return problems


def is_checkable() -> bool:
    """Return whether llama-cpp-python is installed, without importing it."""
    return importlib.util.find_spec(READER) is not None


def export_gguf(
    merged: Path,
    target: Path,
    export: ExportParameters,
    *,
    tokenizer: Any,
    dtype: str,
    name: str,
    rows: HeldOutRows,
    reference: Reference,
    words: str,
    work: Path,
    compare_merged: Callable[[], ParityRecord],
    on_progress: OnProgress,
) -> tuple[ParityRecord, GgufRecord, list[str]]:
    """Write a merged model as a GGUF, and compare the file; where nothing can read it, the model it was made of.

    Args:
        merged: model and settings of generation.
        target: the file.
        export: the ``export`` parameters.
        tokenizer: of the training, with the template that is written.
        dtype: of weights that are not quantized.
        name: of the model.
        rows: what is compared.
        reference: the logits that it should have.
        words: what these are of.
        work: a folder for files.
        compare_merged: compares the merged model.
        on_progress: told the weights written.

    Returns:
        The comparison, how the file was written, and what is to be told of it.

    Raises:
        UserError: a weight or token has no name in the file, or llama.cpp reads something else than was meant.
        MachineFault: the process that compares was killed.
    """
    vocabulary = convert_to_gguf(
        merged,
        target,
        export,
        tokenizer=tokenizer,
        dtype=dtype,
        name=name,
        on_tensor=lambda done, total: on_progress("Writing the GGUF", done, total, "weights"),
    )
    notes, interval, is_checked = list(vocabulary.notes), None, is_checkable()
    if is_checked:
        reading = "llama.cpp reads the GGUF in a process of its own"
        on_progress(reading, 0, 1, "export")
        parity, interval = compare_gguf(
            target,
            export,
            tokenizer=tokenizer,
            stop_ids=stop_ids_of(merged),
            rows=rows,
            reference=reference,
            words=words,
            dtype=dtype if export.gguf.quantization == "none" else export.gguf.quantization,
            work=work,
        )
        on_progress(reading, 1, 1, "export")
    else:
        notes.append(
            "No llama.cpp has read this file: the figures are those of the merged model that it was written from."
        )
        logger.warning("llama-cpp-python is not installed, so nothing has read the GGUF that is published.")
        parity = compare_merged()
    record: GgufRecord = {
        "quantization": export.gguf.quantization,
        "pre_tokenizer": vocabulary.pre_tokenizer,
        "is_checked": is_checked,
        "num_texts": len(rows.rows) if is_checked else 0,
        "loss_change_interval": interval,
    }
    return parity, record, notes


def convert_to_gguf(
    merged: Path,
    target: Path,
    export: ExportParameters,
    *,
    tokenizer: Any,
    dtype: str,
    name: str,
    on_tensor: Callable[[int, int], None],
) -> GgufVocabulary:
    """Write a model folder as one file.

    Args:
        merged: model and settings of generation.
        target: the file.
        export: the ``export`` parameters.
        tokenizer: of the training, with the template that is written.
        dtype: of weights that are not quantized.
        name: of the model.
        on_tensor: told the weights written and their number.

    Returns:
        The vocabulary that was written.

    Raises:
        UserError: a weight or a token has no name in the file.
    """
    config: dict[str, Any] = json.loads((merged / "config.json").read_text(encoding="utf-8"))
    vocabulary = read_vocabulary(
        tokenizer,
        num_embeddings=int(config["vocab_size"]),
        stop_ids=stop_ids_of(merged),
    )
    write_gguf(
        merged, target, vocabulary, dtype=dtype, quantization=export.gguf.quantization, name=name, on_tensor=on_tensor
    )
    return vocabulary


def stop_ids_of(folder: Path) -> list[int]:
    """Return the tokens at which an answer stops, by the settings of generation and the tokenizer.

    Args:
        folder: of a model.
    """
    found: Any = None
    path = folder / GENERATION_NAME
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    if found is None:
        found = load_tokenizer(str(folder.absolute())).eos_token_id
    ids = found if isinstance(found, list) else [found]
    return [int(index) for index in ids if index is not None]


def compare_gguf(
    path: Path,
    export: ExportParameters,
    *,
    tokenizer: Any,
    stop_ids: list[int],
    rows: HeldOutRows,
    reference: Reference,
    words: str,
    dtype: str,
    work: Path,
) -> tuple[ParityRecord, tuple[float, float] | None]:
    """Let llama.cpp read the file in a process of its own and compare what it computes.

    Args:
        path: the file.
        export: the ``export`` parameters.
        tokenizer: of the training.
        stop_ids: tokens at which an answer has to stop.
        rows: what is compared.
        reference: the logits that it should have.
        words: what these are of.
        dtype: of the weights, or their quantization.
        work: a folder for files.

    Returns:
        The comparison, and the interval of the change of the loss.

    Raises:
        UserError: llama.cpp cannot read it, makes other tokens of a text, or does not stop where the model stops.
        MachineFault: the process was killed.
    """
    logits = work / "gguf.logits"
    job: GgufJob = {
        "path": str(path.absolute()),
        "logits": str(logits.absolute()),
        "rows": [{"input_ids": row["input_ids"], "positions": row["positions"]} for row in rows.rows],
        "texts": [_text_of(tokenizer, row) for row in rows.rows],
        "answers": [{"prompt": each["prompt"], "answer": each["answer"]} for each in reference.answers],
        "stop_ids": stop_ids,
        "max_new_tokens": export.parity.max_new_tokens,
    }
    found: GgufResult = run_script(gguf_check.__file__, job, work, reader="llama.cpp")
    _require_same_words(found, reference, tokenizer, num_texts=len(job["texts"]))
    by_row = _sums_by_row(reference, logits, rows.rows)
    distance = describe_distance(_total(by_row))
    return {
        "split": rows.split,
        "num_rows": len(rows.rows),
        "reference": words,
        "distance": distance,
        # llama.cpp has one way to compute, which the bounds are about.
        "distance_in_dtype": None,
        "bounds": _judge(distance, export, dtype),
        "num_answers": len(reference.answers),
        "num_equal_answers": found["num_equal_answers"],
        "dtype": dtype,
        "device": "cpu",
        "seconds": found["seconds"],
        "versions": {"llama-cpp-python": found["version"]},
    }, _interval_of(by_row)


def _text_of(tokenizer: Any, row: ComparedRow) -> Any:
    text = tokenizer.decode(row["input_ids"], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return {"text": text, "ids": list(tokenizer(text, add_special_tokens=False).input_ids)}


def _require_same_words(found: GgufResult, reference: Reference, tokenizer: Any, *, num_texts: int) -> None:
    """Refuse a file whose vocabulary is another one."""
    problems = []
    if found["num_logits"] != reference.num_logits:
        problems.append(f"it has {found['num_logits']} tokens, and the model {reference.num_logits}")
    if found["other_tokens"]:
        text, made, wanted = found["other_tokens"]
        first = next(
            (index for index, pair in enumerate(zip(made, wanted, strict=False)) if pair[0] != pair[1]),
            min(len(made), len(wanted)),
        )
        shown = slice(first, first + _NUM_SHOWN_TOKENS)
        problems.append(
            f"llama.cpp makes other tokens of {found['num_other_texts']} of {num_texts} held-out texts; the first is "
            f"{text[:80]!r}, from token {first + 1} on {made[shown]} in place of {wanted[shown]}"
        )
    if found["missing_stop_ids"]:
        names = tokenizer.convert_ids_to_tokens(found["missing_stop_ids"])
        problems.append(f"llama.cpp does not end an answer at {', '.join(map(str, names))}, where the model does")
    if problems:
        raise UserError(
            f"The GGUF is not published: {'; '.join(problems)}. An earlier export is kept. Set export.format = merged."
        )


def _sums_by_row(reference: Reference, logits: Path, rows: Sequence[ComparedRow]) -> list[Sums]:
    import torch

    readers = [LogitsReader(path, reference.num_logits) for path in (reference.path, logits)]
    sums = []
    for row in rows:
        each, count = Sums(), len(row["targets"])
        each.add(readers[0].take(count), readers[1].take(count), torch.tensor(row["targets"]))
        sums.append(each)
    return sums


def _total(sums: Sequence[Sums]) -> Sums:
    import numpy as np

    total = {field.name: sum(getattr(each, field.name) for each in sums) for field in fields(Sums)}
    # np.max keeps a NaN, which max() of Python may drop.
    total["max_difference"] = float(np.max([each.max_difference for each in sums]))
    return Sums(**total)


def _interval_of(sums: Sequence[Sums]) -> tuple[float, float] | None:
    """Return 95 % of the change of the loss as a fraction, over rows drawn again (percentile bootstrap)."""
    import numpy as np

    if len(sums) < 2:
        return None
    nats = np.array([(each.reference_nats, each.exported_nats) for each in sums])
    drawn = np.random.default_rng(0).integers(len(sums), size=(_NUM_DRAWS, len(sums)))
    before, behind = np.moveaxis(nats[drawn].sum(axis=1), 1, 0)
    if not before.all():
        return None
    low, high = np.quantile((behind - before) / before, (0.025, 0.975))
    return float(low), float(high)


def _judge(distance: DistanceRecord, export: ExportParameters, dtype: str) -> list[BoundRecord]:
    if export.gguf.quantization == "none":
        return judge(distance, export.parity, is_exact=dtype == "float32")
    value, bound = distance["loss_change_fraction"], export.gguf.max_loss_change_fraction
    return [{"name": "quantized_loss_change_fraction", "value": value, "bound": bound, "is_met": value <= bound}]
