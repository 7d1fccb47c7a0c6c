"""What is known of a base model, as the catalog stores it and everything that loads it reads it."""

from __future__ import annotations

from typing import TypedDict


class ModelLocation(TypedDict):
    """Where a model comes from: the keywords of everything that loads a part of it."""

    name_or_path: str
    revision: str | None
    trust_remote_code: bool


class BaseModelRecord(ModelLocation):
    """A base model pinned down: its location, and the digests that results are keyed by."""

    digest: str
    tokenizer_digest: str
    is_embedded: bool


def location_of(record: ModelLocation) -> ModelLocation:
    """Return the location alone.

    Args:
        record: a record of a model.
    """
    return ModelLocation(
        name_or_path=record["name_or_path"],
        revision=record["revision"],
        trust_remote_code=record["trust_remote_code"],
    )
