"""Read a GGUF with llama.cpp and write what it computes, by llama-cpp-python alone.

``python gguf_check.py job.json`` runs in a process of its own and imports nothing of this project. It writes the logits
of the held-out predictions and ``result.json`` beside the job.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

CHUNK_TOKENS = 256
"""Tokens that are computed at once; so many rows of logits are held at most."""


class GgufRow(TypedDict):
    """A row, and where predictions are compared."""

    input_ids: list[int]
    positions: list[int]


class GgufText(TypedDict):
    """A text and the tokens that the tokenizer of the training makes of it."""

    text: str
    ids: list[int]


class GgufAnswered(TypedDict):
    """A prompt and what the reference answers to it."""

    prompt: list[int]
    answer: list[int]


class GgufJob(TypedDict):
    """What is computed."""

    path: str
    # Where the logits go, float32, one prediction after the other.
    logits: str
    rows: list[GgufRow]
    texts: list[GgufText]
    answers: list[GgufAnswered]
    # Tokens at which an answer has to stop.
    stop_ids: list[int]
    max_new_tokens: int


class GgufResult(TypedDict):
    """What llama.cpp has made of it."""

    num_logits: int
    # The first text of which it makes other tokens, with both; none where all are the same.
    other_tokens: list[Any]
    num_other_texts: int
    missing_stop_ids: list[int]
    num_equal_answers: int
    seconds: float
    version: str


class Model:
    """A GGUF in llama.cpp, which keeps what attention remembers in float32."""

    def __init__(self, path: str, num_positions: int) -> None:
        """Load the file.

        Args:
            path: of the file.
            num_positions: tokens of the longest row.
        """
        import llama_cpp

        self.api = llama_cpp
        # Attention remembers in float16 by default, and a GPU rounds in its own way: neither is a property of the file.
        self.llama = llama_cpp.Llama(
            path,
            n_ctx=num_positions,
            n_batch=CHUNK_TOKENS,
            n_ubatch=CHUNK_TOKENS,
            n_gpu_layers=0,
            type_k=llama_cpp.GGML_TYPE_F32,
            type_v=llama_cpp.GGML_TYPE_F32,
            flash_attn=False,
            verbose=False,
        )
        self.context = self.llama.ctx
        self.vocabulary = llama_cpp.llama_model_get_vocab(self.llama.model)
        self.num_logits = int(llama_cpp.llama_vocab_n_tokens(self.vocabulary))
        self.batch = llama_cpp.llama_batch_init(CHUNK_TOKENS, 0, 1)

    def forget(self) -> None:
        """Begin another row."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def predict(self, ids: list[int], wanted: list[int], *, start: int = 0) -> Iterator[npt.NDArray[np.float32]]:
        """Compute tokens behind those that came before.

        Args:
            ids: tokens.
            wanted: indices of ``ids`` of which the logits are wanted, ascending.
            start: position of the first token.

        Yields:
            The logits of each wanted index, ``(vocabulary,)``.
        """
        import numpy as np

        chosen = set(wanted)
        for begin in range(0, len(ids), CHUNK_TOKENS):
            chunk = ids[begin : begin + CHUNK_TOKENS]
            self.batch.n_tokens = len(chunk)
            for index, token in enumerate(chunk):
                self.batch.token[index] = token
                self.batch.pos[index] = start + begin + index
                self.batch.n_seq_id[index] = 1
                self.batch.seq_id[index][0] = 0
                self.batch.logits[index] = begin + index in chosen
            failed = self.api.llama_decode(self.context, self.batch)
            if failed:
                raise SystemExit(f"llama.cpp could not compute a row (llama_decode gave {failed})")
            for index in range(len(chunk)):
                if begin + index in chosen:
                    pointer = self.api.llama_get_logits_ith(self.context, index)
                    yield np.ctypeslib.as_array(pointer, shape=(self.num_logits,)).copy()

    def answer(self, prompt: list[int], *, max_new_tokens: int) -> list[int]:
        """Return the likeliest tokens one by one, the one that ends the answer included.

        Args:
            prompt: tokens.
            max_new_tokens: longest answer.
        """
        self.forget()
        made: list[int] = []
        (logits,) = self.predict(prompt, [len(prompt) - 1])
        while True:
            token = int(logits.argmax())
            made.append(token)
            if len(made) == max_new_tokens or self.api.llama_vocab_is_eog(self.vocabulary, token):
                return made
            (logits,) = self.predict([token], [0], start=len(prompt) + len(made) - 1)


def check(job: GgufJob) -> GgufResult:
    """Let llama.cpp read the file and compute.

    Args:
        job: what.
    """
    import llama_cpp

    began = time.monotonic()
    longest = max(len(row["input_ids"]) for row in job["rows"])
    asked = max((len(each["prompt"]) for each in job["answers"]), default=0) + job["max_new_tokens"]
    model = Model(job["path"], max(longest, asked) + 1)
    with Path(job["logits"]).open("wb") as file:
        for row in job["rows"]:
            model.forget()
            for logits in model.predict(row["input_ids"], row["positions"]):
                file.write(logits.tobytes())
    others = [
        [each["text"], made, each["ids"]]
        for each in job["texts"]
        if (made := model.llama.tokenize(each["text"].encode(), add_bos=False, special=True)) != each["ids"]
    ]
    answers = [
        model.answer(each["prompt"], max_new_tokens=job["max_new_tokens"]) == each["answer"] for each in job["answers"]
    ]
    if "lm_tuning" in sys.modules:
        raise SystemExit("the check has imported this project")
    return {
        "num_logits": model.num_logits,
        "other_tokens": others[0] if others else [],
        "num_other_texts": len(others),
        "missing_stop_ids": [
            index for index in job["stop_ids"] if not llama_cpp.llama_vocab_is_eog(model.vocabulary, index)
        ],
        "num_equal_answers": sum(answers),
        "seconds": time.monotonic() - began,
        "version": str(llama_cpp.__version__),
    }


if __name__ == "__main__":
    given = Path(sys.argv[1])
    given.with_name("result.json").write_text(json.dumps(check(json.loads(given.read_text(encoding="utf-8")))))
