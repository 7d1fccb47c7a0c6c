"""Rows taken through checking, splitting and tokenizing, and what preflight says of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lm_tuning.data.check.checked import read_findings
from lm_tuning.data.split.folder import write_splits
from lm_tuning.models.record import BaseModelRecord
from lm_tuning.parameters import ModelParameters, PreflightParameters, TrainParameters
from lm_tuning.parameters.data import SplitParameters, TokenizeParameters
from lm_tuning.preflight.figures import inspect_tokens
from lm_tuning.preflight.records import StoredRows
from lm_tuning.storage.folders import FolderStore
from lm_tuning.text.tokenize import write_tokens
from tests.support.raw_rows import check_rows, describe_raw
from tests.support.tiny import make_tokenizer

Look = Callable[..., dict[str, Any]]

BASE: BaseModelRecord = {
    "name_or_path": "tiny",
    "revision": None,
    "trust_remote_code": False,
    "digest": "d1",
    "tokenizer_digest": "t1",
    "is_embedded": False,
}
RUN: dict[str, Any] = {
    "device": "cpu",
    "seed": 3,
    "effective_batch_rows": 2,
    "effective_batch_tokens": None,
    "num_epochs": 1,
    "max_steps": None,
    "micro_batch_tokens": None,
    "batching": "auto",
    "warmup_steps": 0,
    "eval_every_steps": None,
    "save_every_steps": None,
    "load_best": False,
    "num_examples": 3,
}


def as_parameters(settings: dict[str, Any]) -> dict[str, Any]:
    """Put the settings into the groups that they belong to."""
    given = {name: value for name, value in settings.items() if name in TrainParameters.model_fields}
    others = {name: value for name, value in settings.items() if name not in {*given, "warmup_steps"}}
    given["micro_batch_tokens"] = given["micro_batch_tokens"] or "auto"
    others["preflight"] = PreflightParameters(num_examples=others.pop("num_examples"))
    return {**others, "train": TrainParameters(**given, trainer={"warmup_steps": settings["warmup_steps"]})}


@pytest.fixture
def look(tmp_path: Path) -> Look:
    """Take rows all the way and look at them; settings go where they belong by name."""

    def run(
        *sources: Sequence[dict[str, Any]],
        weights: Sequence[float] | None = None,
        tokenizer: Any = None,
        checking: dict[str, Any] | None = None,
        splitting: dict[str, Any] | None = None,
        tokenizing: dict[str, Any] | None = None,
        **settings: Any,
    ) -> dict[str, Any]:
        paths = [tmp_path / f"rows{index}.jsonl" for index in range(len(sources))]
        for path, rows in zip(paths, sources, strict=True):
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tokenizer = tokenizer or make_tokenizer()
        checked, splits, tokens = (FolderStore(tmp_path / name) for name in ("rows", "splits", "tokens"))
        with checked.stage("r1") as staged:
            check_rows(staged.path, describe_raw(paths, weights=weights), **(checking or {}))
        rows_folder = checked.publish(staged)
        with splits.stage("s1") as staged:
            division = SplitParameters(**{"validation": 0, "test": 0} | (splitting or {}))
            split_summary = write_splits(staged.path, rows_folder, division, seed=1)
        splits_folder = splits.publish(staged)
        limits = {"max_length_tokens": 64} | (tokenizing or {})
        task = limits.pop("task", "causal_lm")
        tokenize = TokenizeParameters(**limits)
        with tokens.stage("t1") as staged:
            token_summary = write_tokens(staged.path, splits_folder, tokenizer, tokenize, task=task)
            staged.facts = {"sources": {"splits": settings.pop("made_from", "s1")}}
        tokens_folder, findings = tokens.publish(staged), read_findings(rows_folder)
        return inspect_tokens(
            StoredRows(tokens_folder, splits_folder, BASE, token_summary, split_summary, findings),
            tokenizer,
            model=ModelParameters(),
            tokenize=tokenize,
            **as_parameters(RUN | settings),
        )

    return run


def questions(num_rows: int, *, answer: str = "4") -> list[dict[str, Any]]:
    """Make different rows of one prompt and response each: 9 tokens, 2 of them supervised, with the usual answer."""
    return [{"prompt": f"{chr(97 + index % 26)}{index // 26}2?", "response": answer} for index in range(num_rows)]
