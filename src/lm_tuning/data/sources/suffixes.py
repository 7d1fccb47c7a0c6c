"""Tell from the name of a file how its rows are written and how it is packed."""

from __future__ import annotations

from collections.abc import Mapping

FORMAT_OF_SUFFIX: Mapping[str, str] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
"""File formats by the suffix that names them."""

TEXT_FORMATS = ("jsonl", "json", "csv", "tsv")
"""Formats that are read packed as well."""

COMPRESSION_OF_SUFFIX: Mapping[str, str] = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
"""How a file is packed, by the suffix that follows the one of its format."""

KNOWN_SUFFIXES = f"{', '.join(FORMAT_OF_SUFFIX)}; behind the first five may stand {', '.join(COMPRESSION_OF_SUFFIX)}"
"""The suffixes that are read, for messages."""


def suffix_format(path: str) -> tuple[str | None, str | None]:
    """Return format and compression that the name of a file tells, None where it tells none.

    Args:
        path: a path or address; what follows the question mark of a web address does not count.
    """
    name = path.partition("::")[0]
    if name.startswith(("http://", "https://")):
        name = name.partition("?")[0].partition("#")[0]
    name = name.replace("\\", "/").rsplit("/", 1)[-1].lower()
    compression = None
    for suffix, packed in COMPRESSION_OF_SUFFIX.items():
        if name.endswith(suffix):
            name, compression = name.removesuffix(suffix), packed
    stem, dot, suffix = name.rpartition(".")
    return (FORMAT_OF_SUFFIX.get(dot + suffix) if stem or dot else None), compression
