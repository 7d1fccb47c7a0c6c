"""Names that MLflow takes, one for each of ours."""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections import Counter
from collections.abc import Iterable

MAX_NAME_CHARACTERS = 250
_NUM_DIGEST_CHARACTERS = 8


def clean_name(name: str) -> str:
    """Replace what MLflow refuses in a name: everything but letters, digits and ``_ - . / :`` and blanks.

    MLflow also refuses names that are not the shortest way to write a path, such as ``a//b`` or ``a/../b``.
    """
    cleaned = re.sub(r"[^/\w.\- :]", "_", name)
    shortest = posixpath.normpath(cleaned)
    if shortest != cleaned or shortest == "." or shortest.startswith(("..", "/")):
        cleaned = cleaned.replace("/", "_")
        cleaned = "_" if cleaned == "." else re.sub(r"^\.\.", "__", cleaned)
    return cleaned[:MAX_NAME_CHARACTERS]


def distinct_name(name: str) -> str:
    """Return a name that MLflow takes and that no other name has: one that had to be changed ends in a digest."""
    cleaned = clean_name(name)
    return cleaned if cleaned == name else _mark(cleaned, name)


def distinct_names(names: Iterable[str]) -> dict[str, str]:
    """Return the name in MLflow for each of several names, no two alike.

    A name that MLflow takes is kept. One that has to be changed ends in a short digest of the original if another name
    of the same set comes to the same.

    Args:
        names: all different.

    Returns:
        The name in MLflow by name.
    """
    cleaned = {name: clean_name(name) for name in names}
    counts = Counter(cleaned.values())
    return {
        name: short if counts[short] == 1 or short == name else _mark(short, name) for name, short in cleaned.items()
    }


def _mark(cleaned: str, name: str) -> str:
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:_NUM_DIGEST_CHARACTERS]
    return f"{cleaned[: MAX_NAME_CHARACTERS - len(digest) - 1]}-{digest}"
