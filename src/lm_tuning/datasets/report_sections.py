"""Reports that nodes write while they work: one section each, or one file that a failing node leaves as it is."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kedro_datasets._typing import HTMLPreview

from lm_tuning.datasets.entry import HandedDataset, PathDataset
from lm_tuning.json_types import JsonObject
from lm_tuning.reporting.document import ReportSection
from lm_tuning.reporting.markdown import join_sections
from lm_tuning.secrets import mask_known, mask_report
from lm_tuning.storage.atomic import write_json_atomic, write_text_atomic

_EARLIER = "> **This is the report of an earlier run.** A later one began and ended before it had read its rows."


class ReportSectionDataset(PathDataset[ReportSection[JsonObject], ReportSection[JsonObject]]):
    """A named section of a JSON file, and the same section of a Markdown file beside it.

    Nodes that run one after the other describe one thing in one report. Saving a section drops the sections after it,
    since they told of the rows before. A section is a mapping of ``facts`` (any JSON), ``metrics`` (numbers by name)
    and ``markdown`` (its text).

    Example:
        .. code-block:: yaml

            split_report:
              type: lm_tuning.datasets.ReportSectionDataset
              filepath: data/08_reporting/default/data_report.json
              section: splits
              sections: [rows, splits, tokens]
              title: Data report
    """

    def __init__(
        self, filepath: str, section: str, sections: list[str], title: str, metadata: JsonObject | None = None
    ) -> None:
        """Point at a section.

        Args:
            filepath: the JSON file; the Markdown file has its name and the suffix ``.md``.
            section: which part of it this entry is.
            sections: all parts, in the order of the report.
            title: heading of the Markdown file.
            metadata: for plugins and our tracking hook.
        """
        if section not in sections:
            raise ValueError(f"section {section!r} is not one of {sections}")
        super().__init__(filepath, metadata)
        self._section = section
        self._sections = sections
        self._title = title

    @property
    def artifact_paths(self) -> list[Path]:
        """Name the files that tracking copies."""
        return [self._filepath, self._filepath.with_suffix(".md")]

    @property
    def is_first(self) -> bool:
        """Return whether the report begins with this section."""
        return self._section == self._sections[0]

    def load(self) -> ReportSection[JsonObject]:
        """Return the section.

        Raises:
            UserError: if it was not saved yet, naming entry, path and the pipeline that makes it (as the cause of
                Kedro's ``DatasetError``).
        """
        stored = self._read()
        self.require(self._filepath, self._section in stored)
        return stored[self._section]

    def save(self, data: ReportSection[JsonObject]) -> None:
        """Replace the section in both files and drop the ones after it; secrets of this run are masked."""
        position = self._sections.index(self._section)
        stored = self._read()
        kept = {name: stored[name] for name in self._sections[:position] if name in stored}
        # Only secrets that this run knows: what merely looks like one may be a row, which is shown as it is.
        facts, markdown = mask_report(data["facts"]), mask_known(data["markdown"])
        kept[self._section] = {"facts": facts, "metrics": data["metrics"], "markdown": markdown}
        encoded = json.dumps(kept, indent=1, ensure_ascii=False)
        text = join_sections(self._title, (section["markdown"] for section in kept.values()))
        # JSON last: it says which sections there are, so it must not name one whose text is not written yet.
        write_text_atomic(self._filepath.with_suffix(".md"), text)
        write_text_atomic(self._filepath, encoded + "\n")

    def mark_earlier(self) -> None:
        """Note at the head of the Markdown file that it is the report of an earlier run, until a section is saved."""
        path = self._filepath.with_suffix(".md")
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            if not text.startswith(_EARLIER):
                write_text_atomic(path, f"{_EARLIER}\n\n{text}")

    def preview(self) -> HTMLPreview:
        """Return the text of the section."""
        stored = self._read()
        if self._section not in stored:
            return None
        return HTMLPreview(f"<pre>{html.escape(stored[self._section]['markdown'])}</pre>")

    def _read(self) -> dict[str, ReportSection[JsonObject]]:
        if not self._filepath.is_file():
            return {}
        stored: dict[str, ReportSection[JsonObject]] = json.loads(self._filepath.read_text(encoding="utf-8"))
        return stored

    def _exists(self) -> bool:
        return self._section in self._read()


class LiveReport:
    """A JSON file that is replaced as a whole, as often as there is something new.

    It survives pickling: the copy writes the same file.

    Attributes:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        """Choose the file; nothing is written before the first report."""
        self.path = path

    def write(self, report: Mapping[str, Any]) -> None:
        """Replace the file; secrets of this run are masked.

        Args:
            report: values that JSON knows.

        Raises:
            UserError: the disk is full; the previous content stays.
        """
        write_json_atomic(self.path, mask_report(report))


class LiveReportDataset(HandedDataset[LiveReport]):
    """Hand a node a report to write while it works; the same file is the entry that its result is saved to.

    Example:
        .. code-block:: yaml

            live_health:
              type: lm_tuning.datasets.LiveReportDataset
              filepath: data/08_reporting/default/health.json
    """

    who_writes = "is written by the node that takes the report as input"

    def load(self) -> LiveReport:
        """Return the report, without touching the file."""
        return LiveReport(self._filepath)
