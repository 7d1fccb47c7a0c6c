"""Node of the example-data pipeline."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lm_tuning.parameters.data import DataParameters

logger = logging.getLogger(__name__)

DIGEST_CACHE = Path("data/.cache/digests.json")


def prepare_raw_examples(data: DataParameters) -> dict[str, Any]:
    """Check the files that the parameters name, making the example first when it is one of them and not there yet.

    Args:
        data: the ``data`` parameters.

    Returns:
        ``train``, ``validation`` and ``test``, each None or ``path``, ``format``, ``num_bytes`` and ``digest``; and
        ``is_example``.
    """
    from lm_tuning.data.example import EXAMPLE_PATH, make_example
    from lm_tuning.data.raw_files import describe_files, resolve_path
    from lm_tuning.progress import show_progress

    path = resolve_path(data.path)
    is_example = path == Path(EXAMPLE_PATH)
    if is_example and not path.exists():
        with show_progress() as on_progress:
            num_rows = make_example(path, on_progress=on_progress)
        logger.info("Made the example: %d functions of the standard library in %s", num_rows, path)
    elif is_example:
        logger.info("Example reused: %s", path)
    files = describe_files(
        train=data.path, validation=data.validation_path, test=data.test_path, digest_cache=DIGEST_CACHE
    )
    for split, file in files.items():
        if file:
            logger.info("Rows of %s: %s (%.1f MB, %s)", split, file["path"], file["num_bytes"] / 1e6, file["format"])
    return {**files, "is_example": is_example}
