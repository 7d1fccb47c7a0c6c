"""Prove that an export is the model that was trained: its logits on held-out rows, read by a process of its own."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

from lm_tuning.errors import MachineFault, UserError
from lm_tuning.export import plain_check
from lm_tuning.export.plain_check import Answered, ComparedRow, Job, Sums
from lm_tuning.export.records import BoundRecord, DistanceRecord, ParityRecord
from lm_tuning.models.structure import classifier_parts, has_encoder
from lm_tuning.parameters.export import ParityParameters
from lm_tuning.text.records import TokenRow
from lm_tuning.text.store.table import labels_of, open_split

MOST_LOGIT_BYTES = 1 << 30
"""So many bytes of logits are kept on the disk at most; of a larger vocabulary fewer predictions are compared."""
SPLITS_BY_CHOICE = ("test", "validation", "train")


@dataclass(frozen=True)
class HeldOutRows:
    """What two models are compared on.

    Attributes:
        split: where the rows are from.
        rows: at least one.
        prompts: of the first rows that have one.
    """

    split: str
    rows: list[ComparedRow]
    prompts: list[list[int]]


@dataclass(frozen=True)
class Reference:
    """What an export has to come near to.

    Attributes:
        path: float32 logits, one prediction after the other.
        num_logits: numbers of one prediction: tokens of the vocabulary, or classes.
        answers: greedy ones.
        num_embeddings: rows of the embedding of the input; ``None`` for a model that does not say.
    """

    path: Path
    num_logits: int
    answers: list[Answered]
    num_embeddings: int | None


class CheckResult(TypedDict):
    """What the process of :mod:`lm_tuning.export.plain_check` writes."""

    sums: dict[str, Any]
    sums_in_dtype: dict[str, Any] | None
    num_equal_answers: int
    dtype: str
    seconds: float
    versions: dict[str, str]


def choose_rows(
    tokens_folder: Path, parity: ParityParameters, *, config: Any, task: str, num_logits: int
) -> HeldOutRows:
    """Return the first held-out rows: of the test split, else of validation, else of the training rows.

    Args:
        tokens_folder: tokenized splits.
        parity: how many.
        config: of the model.
        task: of the training.
        num_logits: of one prediction.

    Raises:
        UserError: no split has a row with something supervised.
    """
    most = max(MOST_LOGIT_BYTES // (4 * num_logits), 1)
    for split in SPLITS_BY_CHOICE:
        table = open_split(tokens_folder, split)
        given = [table[index] for index in table.num_supervised.nonzero()[0][: parity.num_rows]]
        if not given:
            continue
        rows: list[ComparedRow] = []
        for row in given:
            compared = _compare_row(row, config=config, task=task)
            # What does not fit is cut, so that even one long row can be compared.
            compared["positions"], compared["targets"] = compared["positions"][:most], compared["targets"][:most]
            rows.append(compared)
            most -= len(compared["targets"])
            if most <= 0:
                break
        prompts = [] if task == "sequence_classification" else [prompt for row in given if (prompt := _prompt_of(row))]
        return HeldOutRows(split, rows, prompts[: parity.num_generate_rows])
    raise UserError(f"{tokens_folder} has no row to compare the export on: every split is empty.")


def _compare_row(row: TokenRow, *, config: Any, task: str) -> ComparedRow:
    ids = row.input_ids.tolist()
    if task == "sequence_classification":
        return ComparedRow(input_ids=ids, decoder_input_ids=None, positions=[0], targets=[int(row.label)])
    if has_encoder(config):
        start = row.spans[0][0]
        target = ids[start:]
        shifted = [int(config.decoder_start_token_id), *target[:-1]]
        return ComparedRow(
            input_ids=ids[:start], decoder_input_ids=shifted, positions=list(range(len(target))), targets=target
        )
    # Each token is predicted one position earlier.
    supervised = (labels_of(row) >= 0).nonzero()[0].tolist()
    return ComparedRow(
        input_ids=ids,
        decoder_input_ids=None,
        positions=[index - 1 for index in supervised],
        targets=[ids[index] for index in supervised],
    )


def _prompt_of(row: TokenRow) -> list[int]:
    """Return what an answer is made from; nothing for plain text."""
    start = row.spans[-1][0]
    return row.input_ids.tolist()[:start] if start > 1 else []


def write_reference(
    model: Any,
    rows: HeldOutRows,
    path: Path,
    *,
    task: str,
    device: str,
    max_new_tokens: int,
    on_row: Callable[[], None],
) -> Reference:
    """Write the logits of the model that was trained, in float32.

    Args:
        model: on its device, in evaluation mode.
        rows: what is compared.
        path: the file to write.
        task: of the training.
        device: where the model lies.
        max_new_tokens: longest answer.
        on_row: called after each row.
    """
    is_classifier, num_logits = task == "sequence_classification", 0
    with path.open("wb") as file, exact_products():
        for row in rows.rows:
            if is_classifier:
                logits = _class_logits(model, row, device=device)
            else:
                logits = plain_check.row_logits(model, row, is_classifier=False, device=device)
            num_logits = logits.shape[1]
            file.write(logits.contiguous().numpy().tobytes())
            on_row()
        answers = [
            Answered(
                prompt=prompt,
                answer=plain_check.answer_greedily(model, prompt, max_new_tokens=max_new_tokens, device=device),
            )
            for prompt in rows.prompts
        ]
    embedding = model.get_input_embeddings()
    return Reference(path, num_logits, answers, None if embedding is None else int(embedding.weight.shape[0]))


def _class_logits(model: Any, row: ComparedRow, *, device: str) -> Any:
    """Return the logits of a row's last token, which training reads; plain classes look for the last but padding."""
    import torch

    backbone, head = classifier_parts(model)
    with torch.inference_mode():
        input_ids = torch.tensor([row["input_ids"]], device=device)
        hidden = backbone(input_ids=input_ids, use_cache=False).last_hidden_state[:, -1]  # (1, features)
        return head(hidden).float().cpu()


@contextmanager
def exact_products() -> Iterator[None]:
    """Multiply float32 matrices in float32: TF32 has three digits, and the sixth is looked at."""
    import torch

    matmul: Any = torch.backends.cuda.matmul  # its type information lacks the switch
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def measure_distance(reference: Reference, other: Reference, rows: HeldOutRows) -> DistanceRecord:
    """Compare two references.

    Args:
        reference: what is compared with.
        other: what is compared.
        rows: that both are of.
    """
    import torch

    sums = Sums()
    readers = [plain_check.LogitsReader(each.path, each.num_logits) for each in (reference, other)]
    for row in rows.rows:
        count = len(row["targets"])
        sums.add(readers[0].take(count), readers[1].take(count), torch.tensor(row["targets"]))
    return describe_distance(sums)


def describe_distance(sums: Sums) -> DistanceRecord:
    """Turn sums into figures, each divided once.

    Args:
        sums: over all predictions.
    """
    count = sums.num_predictions
    mean = sums.logits / sums.num_logits
    deviation = math.sqrt(max(sums.squares / sums.num_logits - mean**2, 0.0))
    change = abs(sums.exported_nats - sums.reference_nats)
    return {
        "num_predictions": count,
        "reference_nats": sums.reference_nats / count,
        "exported_nats": sums.exported_nats / count,
        "loss_change_fraction": change / sums.reference_nats if sums.reference_nats else change,
        "mean_kl_nats": sums.kl_nats / count,
        "top_1_agreement": sums.num_agreed / count,
        "max_logit_difference": sums.max_difference / deviation if deviation else sums.max_difference,
    }


def run_check(job: Job, work: Path) -> CheckResult:
    """Load and compare the export in a process of its own.

    Args:
        job: what is compared.
        work: a folder for its files.

    Raises:
        UserError: the export cannot be loaded, or is another model by its shape.
        MachineFault: the process was killed, as for lack of memory.
    """
    found: CheckResult = run_script(plain_check.__file__, job, work, reader="transformers")
    return found


def run_script(script: str, job: Any, work: Path, *, reader: str) -> Any:
    """Run a script that knows nothing of this project on a job.

    Args:
        script: takes the job's path, and writes ``result.json`` beside it.
        job: what is compared, for JSON.
        work: a folder for its files.
        reader: what loads the export there, in words.

    Returns:
        What it has written.

    Raises:
        UserError: the export cannot be loaded, or is another model by its shape.
        MachineFault: the process was killed, as for lack of memory.
    """
    path, result = work / "job.json", work / "result.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    result.unlink(missing_ok=True)
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    # -P: nothing is imported from the script's own folder, where modules may be named like others.
    done = subprocess.run(
        [sys.executable, "-P", script, str(path)],
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    # A library in C ends the process itself where a file is not what it expects.
    if done.returncode < 0 and done.returncode != -signal.SIGABRT:
        raise MachineFault(
            f"The process that compares the export was ended by signal {-done.returncode}, most likely for lack of "
            "memory. Nothing was published. Free some memory, or lower export.parity.num_rows, and run again."
        )
    if done.returncode or not result.is_file():
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise UserError(f"The export cannot be used by {reader} alone, so it is not published: {lines[-1]}")
    return json.loads(result.read_text(encoding="utf-8"))


def judge(distance: DistanceRecord, parity: ParityParameters, *, is_exact: bool) -> list[BoundRecord]:
    """Check a distance against its bounds.

    Args:
        distance: of the export.
        parity: the bounds.
        is_exact: whether the export computes in float32 beside the same weights, so that its logits are bounded.
    """
    if is_exact:
        value = distance["max_logit_difference"]
        return [_bound("max_logit_difference", value, parity.max_logit_difference)]
    agreement, least = distance["top_1_agreement"], parity.min_top_1_agreement
    return [
        _bound("loss_change_fraction", distance["loss_change_fraction"], parity.max_loss_change_fraction),
        _bound("mean_kl_nats", distance["mean_kl_nats"], parity.max_kl_nats),
        {"name": "top_1_agreement", "value": agreement, "bound": least, "is_met": agreement >= least},
    ]


def _bound(name: str, value: float, bound: float) -> BoundRecord:
    # A NaN is within no bound.
    return {"name": name, "value": value, "bound": bound, "is_met": value <= bound}


_PARAMETERS = {
    "max_logit_difference": "export.parity.max_logit_difference",
    "loss_change_fraction": "export.parity.max_loss_change_fraction",
    "mean_kl_nats": "export.parity.max_kl_nats",
    "top_1_agreement": "export.parity.min_top_1_agreement",
    "quantized_loss_change_fraction": "export.gguf.max_loss_change_fraction",
}


def require_bounds(record: ParityRecord) -> None:
    """Refuse an export that misses a bound.

    Args:
        record: of its comparison.

    Raises:
        UserError: naming every bound with what was found.
    """
    missed = [bound for bound in record["bounds"] if not bound["is_met"]]
    if not missed:
        return
    distance = record["distance"]
    found = "; ".join(
        f"{bound['name']} is {bound['value']:.3g} ({_PARAMETERS[bound['name']]} = {bound['bound']:g})"
        for bound in missed
    )
    raise UserError(
        f"The export is not published, since it is another model than {record['reference']}: {found}. Compared were "
        f"{distance['num_predictions']:,} predictions of {record['num_rows']:,} rows of the {record['split']} split, "
        f"with a loss of {distance['exported_nats']:.5f} nats against {distance['reference_nats']:.5f}. An earlier "
        f"export is kept. {_how_to_fix(record['dtype'])}"
    )


def _how_to_fix(dtype: str) -> str:
    if dtype == "float32":
        return "Its weights are in float32 already, so rounding is not the cause: what was written is another model."
    if dtype in ("bfloat16", "float16"):
        return "Set export.dtype = float32, which keeps every digit, or raise the bound."
    return "Set export.gguf.quantization to one of more bits, such as q8_0, or to none, or raise the bound."


def describe_sums(sums: dict[str, Any]) -> DistanceRecord:
    """Read the sums that the process has written.

    Args:
        sums: fields of :class:`Sums`.
    """
    known = {name: sums[name] for name in asdict(Sums())}
    return describe_distance(Sums(**known))
