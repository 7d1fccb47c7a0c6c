"""Use a stored model as its own README says, in a process that has transformers and peft but not this project."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_tuning.storage.folders import FolderStore
from lm_tuning.text.store.table import open_split

PROGRAM = """
import json, os, sys

sys.modules["lm_tuning"] = None  # an import of it fails
folder, request = sys.argv[1:]
os.chdir(folder)
readme = open("README.md", encoding="utf-8").read()
exec(readme.split("```python")[1].split("```")[0])

import torch

asked = json.load(open(request, encoding="utf-8"))
given = []
for ids in asked["inputs"]:
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    with torch.no_grad():
        if asked["max_new_tokens"] is None:
            given.append(model.config.id2label[int(model(**inputs).logits.argmax())])
            continue
        output = model.generate(**inputs, max_new_tokens=asked["max_new_tokens"])[0].tolist()
    if not model.config.is_encoder_decoder:
        output = output[len(ids) :]
    given.append(tokenizer.decode(output, skip_special_tokens=True, clean_up_tokenization_spaces=False))
json.dump(given, open(asked["answers"], "w", encoding="utf-8"))
"""


def read_samples(data: Path, output: str) -> list[dict[str, Any]]:
    """Read what an evaluation stored of each row that the tuned model answered or classified.

    Args:
        data: the folder ``data`` of a run.
        output: the run's ``output``.

    Returns:
        ``input_ids`` that the model was given, and its ``answer``: a text or the name of a class.
    """
    tokens = FolderStore(data / "05_model_input" / output / "tokens").current()
    tables = [table for split in ("train", "validation", "test") if len(table := open_split(tokens, split))]
    rows = {row.row_id: row for table in tables for row in table}
    with (data / "07_model_output" / output / "evaluation_samples.csv").open(newline="", encoding="utf-8") as file:
        stored = list(csv.DictReader(file))
    found = []
    for sample in stored:
        row = rows[int(sample["row_id"])]
        ids = row.input_ids.tolist()
        found.append({"input_ids": ids[: row.spans[-1][0]] if row.spans else ids, "answer": sample["tuned"]})
    return found


def answer_plainly(
    tuned_model: Path, inputs: Sequence[Sequence[int]], work: Path, *, max_new_tokens: int | None
) -> list[str]:
    """Load a stored model by the code in its README and let it answer.

    Args:
        tuned_model: the stored model.
        inputs: token ids of each row.
        work: an empty folder.
        max_new_tokens: longest answer; ``None`` classifies.

    Returns:
        The answers, or the names of the classes.
    """
    request, answers, program = work / "request.json", work / "answers.json", work / "program.py"
    asked = {"inputs": [list(ids) for ids in inputs], "max_new_tokens": max_new_tokens, "answers": str(answers)}
    request.write_text(json.dumps(asked))
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), str(tuned_model), str(request)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        cwd=work,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(answers.read_text(encoding="utf-8")))
