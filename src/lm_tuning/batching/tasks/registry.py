"""Find a task by its name."""

from __future__ import annotations

from typing import Any

from lm_tuning.batching.tasks.base import TrainingTask
from lm_tuning.batching.tasks.causal_lm import CausalLanguageModeling
from lm_tuning.batching.tasks.classification import SequenceClassification
from lm_tuning.batching.tasks.seq2seq import SequenceToSequence


def get_task(name: str, *, pad_id: int, decoder_start_id: int | None = None) -> TrainingTask:
    """Return a task by its name.

    Args:
        name: the ``task`` parameter.
        pad_id: fills the end of shorter padded rows.
        decoder_start_id: what a decoder starts from; for ``seq2seq_lm``.
    """
    if name == "seq2seq_lm":
        assert decoder_start_id is not None, "an encoder-decoder's config names it"
        return SequenceToSequence(pad_id=pad_id, decoder_start_id=decoder_start_id)
    return {"causal_lm": CausalLanguageModeling, "sequence_classification": SequenceClassification}[name](pad_id=pad_id)


def task_of(model: Any, name: str, *, pad_id: int) -> TrainingTask:
    """Return the task of a loaded model.

    Args:
        model: as ``load_model`` returns it.
        name: the ``task`` parameter.
        pad_id: fills the end of shorter padded rows.
    """
    return get_task(name, pad_id=pad_id, decoder_start_id=getattr(model.config, "decoder_start_token_id", None))
