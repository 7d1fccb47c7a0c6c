"""What is known of a base model, as the catalog stores it and everything that loads it reads it."""

from __future__ import annotations

from typing import TypedDict


class ModelPlace(TypedDict):
    """Where a model comes from: the keywords of everything that loads a part of it."""

    name_or_path: str
    revision: str | None
    trust_remote_code: bool


class BaseModelRecord(ModelPlace):
    """A base model pinned down: its place, and the digests that results are keyed by."""

    digest: str
    tokenizer_digest: str
    is_embedded: bool


def place_of(record: ModelPlace) -> ModelPlace:
    """Return the place alone.

    Args:
        record: a record of a model.
    """
    return ModelPlace(
        name_or_path=record["name_or_path"],
        revision=record["revision"],
        trust_remote_code=record["trust_remote_code"],
    )
