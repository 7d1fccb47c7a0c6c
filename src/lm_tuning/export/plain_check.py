"""Compare an export with the logits that it should have, by transformers and PEFT alone.

``python plain_check.py job.json`` loads the export as any program does and writes ``result.json`` beside the job. It
runs in a process of its own and imports nothing of this project, so that nothing of it can make an export look whole.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

CHUNK_PREDICTIONS = 32
"""Predictions compared at once: in float64 a vocabulary of 151,936 tokens takes 1.2 MB for each and each model."""


class ComparedRow(TypedDict):
    """A row, and the predictions in it that are compared."""

    # What is read; of an encoder-decoder what the encoder reads.
    input_ids: list[int]
    # What a decoder of its own reads; none for other models.
    decoder_input_ids: list[int] | None
    # Where the predictions are made, and the token, or class, that is right there.
    positions: list[int]
    targets: list[int]


class Answered(TypedDict):
    """A prompt, and what the reference answers to it."""

    prompt: list[int]
    answer: list[int]


class BaseOfAdapter(TypedDict):
    """What an adapter is put on."""

    name_or_path: str
    revision: str | None
    num_labels: int | None
    num_embeddings: int | None
    # Keywords of a BitsAndBytesConfig, with the name of a dtype; none for weights that are not quantized.
    quantization: dict[str, Any] | None


class Job(TypedDict):
    """What is compared."""

    folder: str
    auto_class: str
    device: str
    trust_remote_code: bool
    is_classifier: bool
    pad_token_id: int
    adapter: BaseOfAdapter | None
    rows: list[ComparedRow]
    # Logits of the reference, float32, one row of them for each prediction, in the order of the rows.
    logits: str
    num_logits: int
    answers: list[Answered]
    max_new_tokens: int


@dataclass
class Sums:
    """What every figure of a comparison is made of."""

    num_predictions: int = 0
    reference_nats: float = 0.0
    exported_nats: float = 0.0
    kl_nats: float = 0.0
    num_agreed: int = 0
    max_difference: float = 0.0
    logits: float = 0.0
    squares: float = 0.0
    num_logits: int = 0

    def add(self, reference: torch.Tensor, exported: torch.Tensor, targets: torch.Tensor) -> None:
        """Add predictions.

        Args:
            reference: logits, ``(predictions, vocabulary)``.
            exported: logits of the same predictions.
            targets: what is right, ``(predictions,)``.
        """
        for start in range(0, len(targets), CHUNK_PREDICTIONS):
            chunk = slice(start, start + CHUNK_PREDICTIONS)
            self._add(reference[chunk].double(), exported[chunk].double(), targets[chunk])

    def _add(self, reference: torch.Tensor, exported: torch.Tensor, targets: torch.Tensor) -> None:
        expected, found = reference.log_softmax(-1), exported.log_softmax(-1)
        right = targets[:, None]
        self.num_predictions += len(targets)
        self.reference_nats -= float(expected.gather(1, right).sum())
        self.exported_nats -= float(found.gather(1, right).sum())
        self.kl_nats += float((expected.exp() * (expected - found)).sum())
        self.num_agreed += int((reference.argmax(-1) == exported.argmax(-1)).sum())
        # max() of Python would drop a NaN that comes second.
        difference = float((reference - exported).abs().max())
        self.max_difference = difference if math.isnan(difference) else max(self.max_difference, difference)
        self.logits += float(reference.sum())
        self.squares += float(reference.square().sum())
        self.num_logits += reference.numel()


class LogitsReader:
    """Read logits from a file, one row's predictions after the other."""

    def __init__(self, path: Path | str, num_logits: int) -> None:
        """Map the file.

        Args:
            path: float32 numbers, one prediction after the other.
            num_logits: numbers of one prediction.
        """
        import numpy as np

        self._logits: npt.NDArray[np.float32] = np.memmap(path, dtype=np.float32, mode="r").reshape(-1, num_logits)
        self._next = 0

    def take(self, count: int) -> torch.Tensor:
        """Return the next predictions, ``(count, logits)``.

        Args:
            count: how many.
        """
        import numpy as np
        import torch

        start, self._next = self._next, self._next + count
        return torch.from_numpy(np.array(self._logits[start : self._next]))


def row_logits(model: Any, row: ComparedRow, *, is_classifier: bool, device: str) -> torch.Tensor:
    """Return the logits of a row's predictions in float32, ``(predictions, logits)``.

    Args:
        model: in evaluation mode.
        row: alone, so that no padding is needed.
        is_classifier: whether the model has one prediction for a row, of its class.
        device: where the model lies.
    """
    import torch

    input_ids = torch.tensor([row["input_ids"]], device=device)
    positions = torch.tensor(row["positions"], device=device)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(input_ids), "use_cache": False}
    if row["decoder_input_ids"] is not None:
        options["decoder_input_ids"] = torch.tensor([row["decoder_input_ids"]], device=device)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    # Of a long prompt all logits together take gigabytes.
    keeps = "logits_to_keep" in inspect.signature(type(inner).forward).parameters
    if keeps and not is_classifier:
        options["logits_to_keep"] = positions
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=input_ids, **options).logits
    # (1, classes); (1, predictions, vocabulary); or of (1, sequence, vocabulary) what is compared
    return (logits if is_classifier else logits[0] if keeps else logits[0, positions]).float().cpu()


def answer_greedily(model: Any, prompt: list[int], *, max_new_tokens: int, device: str) -> list[int]:
    """Return the tokens that a model answers with, its likeliest one by one.

    Args:
        model: in evaluation mode, with its settings of generation.
        prompt: token ids.
        max_new_tokens: longest answer.
        device: where the model lies.
    """
    import torch

    input_ids = torch.tensor([prompt], device=device)
    with torch.inference_mode():
        made: list[int] = model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
        )[0].tolist()
    # A causal model's output begins with its prompt, a decoder's with its start token.
    return made[len(prompt) :] if made[: len(prompt)] == prompt else made


def load(job: Job) -> Any:
    """Load an export as its own README says.

    Args:
        job: names it.
    """
    import torch
    import transformers

    auto_class = getattr(transformers, job["auto_class"])
    adapter = job["adapter"]
    options: dict[str, Any] = {"trust_remote_code": job["trust_remote_code"]}
    if adapter is None:
        whole = auto_class.from_pretrained(job["folder"], dtype="auto", local_files_only=True, **options)
        return whole.to(job["device"]).eval()
    from peft import PeftModel

    options |= {"revision": adapter["revision"], "dtype": torch.float32}
    if adapter["num_labels"] is not None:
        options["num_labels"] = adapter["num_labels"]
    if adapter["quantization"] is not None:
        named = {key: getattr(torch, str(value)) if key.endswith("_dtype") else value
                 for key, value in adapter["quantization"].items()}  # fmt: skip
        make_config: Any = transformers.BitsAndBytesConfig  # not typed
        options["quantization_config"] = make_config(**named)
        options["device_map"] = {"": job["device"]}
    base = auto_class.from_pretrained(adapter["name_or_path"], **options)
    rows = adapter["num_embeddings"]
    if rows is not None and base.get_input_embeddings().weight.shape[0] != rows:
        base.resize_token_embeddings(rows, mean_resizing=False)
    model: Any = PeftModel.from_pretrained(base, job["folder"])
    if (Path(job["folder"]) / "generation_config.json").is_file():
        model.get_base_model().generation_config = transformers.GenerationConfig.from_pretrained(job["folder"])
    if job["is_classifier"]:
        model.config.pad_token_id = job["pad_token_id"]
    return (model if adapter["quantization"] is not None else model.to(job["device"])).eval()


def add_rows(job: Job, model: Any) -> Sums:
    """Compare every row.

    Args:
        job: rows, and where the reference's logits are.
        model: the export.
    """
    import torch

    reader, sums = LogitsReader(job["logits"], job["num_logits"]), Sums()
    for row in job["rows"]:
        exported = row_logits(model, row, is_classifier=job["is_classifier"], device=job["device"])
        if exported.shape[1] != job["num_logits"]:
            raise SystemExit(f"the export has {exported.shape[1]} logits, and its original {job['num_logits']}")
        sums.add(reader.take(len(row["targets"])), exported, torch.tensor(row["targets"]))
    return sums


def compare(job: Job) -> dict[str, Any]:
    """Load the export and compare it.

    Args:
        job: what with.
    """
    import torch
    import transformers

    began = time.monotonic()
    # Differences of the sixth digit are looked for, which TF32 does not have.
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    # The tokenizer is a part of the export, though the rows are tokenized already.
    transformers.AutoTokenizer.from_pretrained(
        job["folder"], trust_remote_code=job["trust_remote_code"], local_files_only=True
    )
    model = load(job)
    dtype = str(model.dtype).removeprefix("torch.")
    in_dtype = None if dtype == "float32" else asdict(add_rows(job, model))
    answers = [
        answer_greedily(model, each["prompt"], max_new_tokens=job["max_new_tokens"], device=job["device"])
        for each in job["answers"]
    ]
    # What was written is judged apart from how coarsely 16 bits compute, which any model in them does.
    sums = add_rows(job, model if in_dtype is None else model.float())
    if "lm_tuning" in sys.modules:
        raise SystemExit("the plain check has imported this project")
    return {
        "sums": asdict(sums),
        "sums_in_dtype": in_dtype,
        "num_equal_answers": sum(made == each["answer"] for made, each in zip(answers, job["answers"], strict=True)),
        "dtype": dtype,
        "seconds": time.monotonic() - began,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


if __name__ == "__main__":
    path = Path(sys.argv[1])
    result = compare(json.loads(path.read_text(encoding="utf-8")))
    path.with_name("result.json").write_text(json.dumps(result), encoding="utf-8")
