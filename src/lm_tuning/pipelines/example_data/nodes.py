"""Node of the example-data pipeline."""

from __future__ import annotations

import logging
from pathlib import Path

from lm_tuning.data.records import SPLITS, RawExamples, SourceFile
from lm_tuning.parameters.data import DataParameters
from lm_tuning.pipelines import DIGEST_CACHE
from lm_tuning.wording import count_of

logger = logging.getLogger(__name__)


def prepare_raw_examples(data: DataParameters) -> RawExamples:
    """Check the files that the parameters name, making the example first when it is one of them and not there yet.

    Args:
        data: the ``data`` parameters.

    Returns:
        What ``describe_files`` says of them, and ``is_example``: the example is all that is read for training.
    """
    from lm_tuning.data.example import is_example, names_example
    from lm_tuning.data.sources.describe import describe_files

    train, validation, test = data.path, data.validation_path, data.test_path
    if names_example(train) or names_example(validation) or names_example(test):
        _prepare_example()
    # Digests are made here, once, so that later nodes need not open a file to know whether it is the same.
    files = describe_files(train=train, validation=validation, test=test, digest_cache=DIGEST_CACHE)
    for split in SPLITS:
        if of_split := files[split]:
            _log_files(split, of_split)
    return {**files, "is_example": is_example(train)}


def _prepare_example() -> None:
    """Make the example unless it is there."""
    from lm_tuning.data.example import EXAMPLE_PATH, make_example
    from lm_tuning.progress import show_progress

    path = Path(EXAMPLE_PATH)
    # Whatever lies there is taken: a user may have changed it.
    if path.exists():
        logger.info("Example reused: %s", path)
        return
    # Made of the standard library's own functions, so that the first run needs no network.
    with show_progress() as on_progress:
        num_rows = make_example(path, on_progress=on_progress)
    logger.info("Made the example: %s of the standard library in %s", count_of(num_rows, "function"), path)


def _log_files(split: str, files: list[SourceFile]) -> None:
    """Describe in a line which files the rows of a split come from."""
    # None stands for a hub data set or an address that does not tell its size.
    num_bytes = sum(file["num_bytes"] or 0 for file in files)
    formats = ", ".join(sorted({file["format"] for file in files}))
    # One line, however many files: all of them stand in raw_examples.json.
    what = files[0]["path"] if len(files) == 1 else f"{len(files):,} files, first {files[0]['path']}"
    size = f"{num_bytes / 1e6:.1f} MB, " if num_bytes else ""
    logger.info("Rows of %s: %s (%s%s)", split, what, size, formats)
